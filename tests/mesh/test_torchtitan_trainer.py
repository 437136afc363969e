"""torchtitan's real Trainer, with the page's lines for it: every number that it logs is that of its own run.

It is its Llama, loss, optimizer, schedule and clipping; the tokens come from this test instead of a dataset. What
torchtitan has for GPUs only, or expects of a later torch, is replaced on both sides.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
from pages import find_blocks
from ranks import run_ranks
from torch.distributed.fsdp import FSDPModule

pytestmark = pytest.mark.oracle("torchtitan", "torchdata")

LAYOUTS = [
    {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
    pytest.param(
        {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}, marks=pytest.mark.slow
    ),
]
STEPS, BATCH, SEQ = 2, 2, 16
STATISTICS = ("max_active_gib", "max_active_pct", "max_reserved_gib", "max_reserved_pct")
set_gradient_divide_factor = FSDPModule.set_gradient_divide_factor


@pytest.fixture(scope="module", autouse=True)
def _torchtitan_for_cpus() -> Iterator[None]:
    """Import the Trainer once for all ranks, without what it does not need here: kernels for GPUs, datasets, logs."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "torchtitan.distributed.minimal_async_ep.kernels",
            "torchtitan.hf_datasets.text_datasets",
            "torch.utils.tensorboard",
        ):
            patch.setitem(sys.modules, name, mock.MagicMock())
        for name in ("torchtitan.trainer", "torchtitan.models.llama3"):
            import_module(name)
        for module in ("torchtitan.tools.utils", "torchtitan.distributed.utils"):
            patch.setattr(f"{module}.device_type", "cpu")
            patch.setattr(f"{module}.device_module", torch.cpu)
        patch.setattr("torchtitan.distributed.parallel_dims.device_type", "cpu")
        patch.setattr("torchtitan.distributed.utils.set_pg_timeouts", mock.Mock())  # needs a later torch
        patch.setattr("torchtitan.components.metrics.build_device_memory_monitor", _memory_monitor)
        patch.setattr(FSDPModule, "set_gradient_divide_factor", _divide_by)
        patch.setattr("time.sleep", mock.Mock())  # two seconds at the end of train()
        yield


def _memory_monitor() -> Any:
    """Return what torchtitan asks of the memory of a GPU."""
    monitor = mock.Mock(device_name="cpu")
    monitor.get_peak_stats.return_value = mock.Mock(**dict.fromkeys(STATISTICS, 0.0))
    return monitor


def _divide_by(self: FSDPModule, factor: float) -> None:
    """Set the factor of FSDP2, and let it sum and divide: gloo has no reduction that does both."""
    self.set_force_sum_reduction_for_comms(True)
    set_gradient_divide_factor(self, factor)


def _config(layout: dict[str, int]) -> Any:
    """Return torchtitan's configuration for a small Llama, with plain attention and tokens of this file."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    class Tokens(BaseDataLoader):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):  # type: ignore[misc]
            pass

        def __init__(self, *, dp_rank: int, **_: Any) -> None:
            self.generator = torch.Generator().manual_seed(dp_rank)

        def __iter__(self) -> Iterator[Any]:
            while True:
                tokens = torch.randint(2048, (BATCH, SEQ + 1), generator=self.generator)
                yield {"input": tokens[:, :-1]}, tokens[:, 1:]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):  # type: ignore[misc]
            pass

        def __init__(self, **_: Any) -> None:
            super().__init__()

        encode = decode = get_vocab_size = None

    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        model_spec=spec,
        tokenizer=NoTokenizer.Config(),
        dataloader=Tokens.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        training=TrainingConfig(
            local_batch_size=BATCH,
            seq_len=SEQ,
            steps=STEPS,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", **layout),
        metrics=MetricsProcessor.Config(log_freq=1),
    )


def _mesh_trainer() -> Any:
    """Return the page's subclass of the Trainer."""
    from torchtitan.trainer import Trainer

    (source,) = find_blocks("python", "run: titan_trainer")
    (recipe,) = find_blocks("python", r"file: titan_dims\.py")
    names: dict[str, Any] = {"Trainer": Trainer}
    exec(compile(recipe + source, "the page", "exec"), names)  # noqa: S102  the page is ours
    return names["MeshTrainer"]


def _logged(layout: dict[str, int], *, on_mesh: bool) -> tuple[list[Any], bool]:
    """Train in a layout; return step, losses and norm as they are logged, and if the mesh has torchtitan's groups."""
    from torchtitan.trainer import Trainer

    trainer = (_mesh_trainer() if on_mesh else Trainer)(_config(layout))
    logged = []
    with mock.patch.object(trainer.metrics_processor, "log", lambda *values, **_: logged.append(values)):
        trainer.train()
    mesh = getattr(trainer, "mesh", None)
    shares = mesh is not None and trainer.parallel_dims.get_mesh("fsdp").get_group() is mesh.group("dp_shard")
    return logged, shares


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_number_that_the_trainer_logs_on_a_mesh_is_that_of_its_own_run(layout: dict[str, int]) -> None:
    own = run_ranks(4, partial(_logged, on_mesh=False), layout, init=False)
    on_mesh = run_ranks(4, partial(_logged, on_mesh=True), layout, init=False)
    assert [logged for logged, _ in on_mesh] == [logged for logged, _ in own]
    assert [len(logged) for logged, _ in own] == [STEPS] * 4
    assert all(shares for _, shares in on_mesh)
