"""Low-rank adapters around sharded layers, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from tp_compare import assert_right, hf_difference, problem_of, sharded, training_difference
from tp_models import llama_plan as llama_plan
from tp_models import Llama, Lora, hf_model

from namedmesh.errors import PlanError
from namedmesh.tensor_parallel import plan_from_hf, plan_report


def adapted_llama() -> Llama:
    torch.manual_seed(0)
    model: Any = Llama(n_heads=8, n_kv_heads=2, layers=1)
    model.requires_grad_(False)
    for block in model.layers:
        for owner in (block.attention, block.feed_forward):
            for name, linear in list(owner.named_children()):
                setattr(owner, name, Lora(linear))
    adapted: Llama = model.double()
    return adapted


def differences() -> list[float]:
    found = []
    for sequence_parallel in (False, True):
        reference = adapted_llama()
        model = sharded(reference, llama_plan(sequence_parallel=sequence_parallel))
        ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
        found.append(training_difference(model, reference, ids))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_adapters_train_as_those_of_the_whole_model(size: int) -> None:
    assert_right(run_ranks(size, differences), 1e-10)


def test_the_report_names_what_is_inside() -> None:
    rows = {
        row.module: (row.style, row.placement) for row in plan_report(adapted_llama(), 2, llama_plan()).rows
    }
    assert rows["layers.0.attention.wq.base_layer"] == ("ColwiseParallel", "Shard(0)")
    assert rows["layers.0.attention.wq.lora_B.default"] == ("ColwiseParallel", "Shard(0)")
    assert rows["layers.0.attention.wo.lora_A.default"] == ("RowwiseParallel", "Shard(1)")
    assert "layers.0.attention.wo.lora_B.default" not in rows


def test_other_adapters_are_refused() -> None:
    model: Any = adapted_llama()
    model.layers[0].attention.wq.lora_magnitude_vector["default"] = nn.Linear(1, 1)
    del model.layers[0].attention.wo.lora_A
    model.output = Lora(nn.Linear(32, 32))
    model.output.base_layer = nn.Embedding(32, 32)
    kind = f"{Lora.__module__.partition('.')[0]}'s Lora"
    assert problem_of(model, llama_plan()) == (
        "3 problems:\n"
        f"  - output: {kind} is an adapter around Embedding, and only LoRA around nn.Linear can be sharded, by a "
        "column or row style\n"
        f"  - layers.0.attention.wq: {kind} is a variant of LoRA (lora_magnitude_vector), which cannot be sharded; "
        "merge it into the model first\n"
        f"  - layers.0.attention.wo: {kind} is an adapter other than LoRA, which cannot be sharded; merge it into "
        "the model first"
    )


# --- PEFT itself --------------------------------------------------------------------------------------------


def peft_model(rank: int = 4, **options: Any) -> Any:
    model = hf_model("Qwen3", num_key_value_heads=2, head_dim=8)
    import peft

    adapters = peft.LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False, **options)
    return peft.get_peft_model(model, adapters).double()


@pytest.mark.oracle("transformers", "peft")
@pytest.mark.parametrize(("size", "rank"), [(2, 4), (4, 4), (2, 8)])  # 8 is the width of a head
def test_a_peft_model_trains_as_the_whole_one(size: int, rank: int) -> None:
    assert max(run_ranks(size, hf_difference, peft_model(rank))) < 1e-5


@pytest.mark.oracle("transformers", "peft")
def test_dora_is_refused() -> None:
    model = peft_model(use_dora=True)
    with pytest.raises(PlanError, match=r"variant of LoRA .* merge it"):
        plan_report(model, 2, plan_from_hf(model))
    merged = model.merge_and_unload()
    assert plan_report(merged, 2, plan_from_hf(merged)).rows


class Wrapped(nn.Module):
    """As a ``PeftModel``: the model inside is two names away."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model

    def get_base_model(self) -> nn.Module:
        return self.base_model.model  # type: ignore[return-value]


def test_the_plan_of_the_model_inside() -> None:
    inner: Any = nn.Module()
    inner.up, inner.down = Lora(nn.Linear(8, 16)), Lora(nn.Linear(16, 8))
    inner._tp_plan = {"up": "colwise", "down": "rowwise"}
    plan = plan_from_hf(Wrapped(inner))
    assert list(plan) == ["base_model.model.up", "base_model.model.down"]
    assert len(plan_report(Wrapped(inner), 2, plan).rows) == 6
