"""Sizes from Hugging Face configurations: the published numbers of parameters follow from them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from namedmesh.__main__ import main
from namedmesh.plan import UsageError, read_config

if TYPE_CHECKING:
    from pathlib import Path

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "topk_group": 4, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_layer_freq": 1, "vocab_size": 129280,
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "vocab_size": 151936,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25, "vocab_size": 50257}


def written(tmp_path: Path, config: dict[str, Any]) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("config", "billions"), [(LLAMA, 8.03), (DEEPSEEK, 671.0), (QWEN3_MOE, 30.5), (GPT2, 1.56)]
)
def test_configurations_amount_to_the_published_parameters(
    tmp_path: Path, config: dict[str, Any], billions: float
) -> None:
    model, notes = read_config(written(tmp_path, config))
    assert model.total / 1e9 == pytest.approx(billions, rel=0.005)
    assert (notes, model.problems()) == ([], [])
    assert read_config(str(tmp_path))[0] == model


def test_what_a_configuration_cannot_say_is_named(tmp_path: Path) -> None:
    config = {**QWEN3_MOE, "decoder_sparse_step": 2, "layer_types": ["full_attention", "sliding_attention"]}
    config |= {"shared_expert_intermediate_size": 512, "num_nextn_predict_layers": 1, "max_window_layers": 48}
    _, notes = read_config(written(tmp_path, config))
    (note,) = notes
    named = set(note.partition(" may ")[0].split(", "))
    assert named == {
        "decoder_sparse_step",
        "layer_types",
        "shared_expert_intermediate_size",
        "num_nextn_predict_layers",
    }
    _, notes = read_config(written(tmp_path, {**QWEN3_MOE, "moe_layer_freq": [0, 1, 1]}))
    assert notes[0].startswith("moe_layer_freq may change the sizes")
    model, notes = read_config(written(tmp_path, {"text_config": LLAMA, "vision_config": {"hidden_size": 1}}))
    assert model.total == 8_030_261_248
    assert notes == ["vision_config is not read: only the text model is counted"]


def test_flags_override_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["partitions", "--world-size", "3", "--config", written(tmp_path, LLAMA), "--format", "json"]
    found = []
    for flags in ([], ["--hidden", "3072", "--vocab", "30000", "--heads", "48"]):
        main([*command, *flags])
        listed = json.loads(capsys.readouterr().out)["partitions"]
        found.append(next(one["reasons"] for one in listed if one["tp"] == 3))
    assert found[0][:2] == ["32 heads do not divide by tp=3", "4096 hidden features do not divide by tp=3"]
    assert not any("heads do" in reason or "hidden" in reason for reason in found[1])


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'/nowhere/config\.json' cannot be read"):
        read_config("/nowhere")
    with pytest.raises(UsageError) as caught:
        read_config(written(tmp_path, {"hidden_size": "wide"}))
    assert len(caught.value.problems) == 4
    assert "hidden_size is 'wide'" in caught.value.problems[0]
    (tmp_path / "list.json").write_text("[]", encoding="utf-8")
    with pytest.raises(UsageError, match="holds no JSON object, but a list"):
        read_config(str(tmp_path / "list.json"))
