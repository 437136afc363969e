"""What the layers read of Megatron's configuration object, and what holds where there is none."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
import torch.distributed as dist

from namedmesh.compat.errors import ContractRuntimeError
from namedmesh.launch import default_group_device
from namedmesh.tensor_parallel.layers import Initializer, Recipe

ABSENT = {
    "gradient_accumulation_fusion": (
        "adding up gradients inside the matrix product needs APEX's CUDA extension fused_weight_gradient_mlp_cuda"
    ),
    "defer_embedding_wgrad_compute": "it builds on gradient_accumulation_fusion",
}
"""Settings that these layers have nothing for, and why."""


@dataclass(frozen=True)
class Settings:
    """The settings that matter to a layer, read from any object that has some of them.

    Args:
        params_dtype: of the parameters; by default torch's default dtype.
        use_cpu_initialization: draw the whole weight on every rank and shard it, so that the weights do not
            depend on the number of ranks. Otherwise so too, unless the ranks compute on an accelerator: there
            each draws its own shard.
        perform_initialization: fill the parameters at all.
        sequence_parallel: outside of the layers, activations are sharded along their first dim.
        expert_model_parallel_size: more than 1 marks parameters of expert layers as not to be all-reduced
            over the data-parallel ranks.
        deterministic_mode: look embeddings up in a way whose gradient adds up in the same order each time.
        gradient_accumulation_fusion: not to be had here.
        defer_embedding_wgrad_compute: not to be had here.

    Example:
        >>> from types import SimpleNamespace
        >>> settings = Settings.of(SimpleNamespace(sequence_parallel=True), "a layer")
        >>> settings.sequence_parallel, settings.perform_initialization
        (True, True)
    """

    params_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    use_cpu_initialization: bool = False
    perform_initialization: bool = True
    sequence_parallel: bool = False
    expert_model_parallel_size: int = 1
    deterministic_mode: bool = False
    gradient_accumulation_fusion: bool = False
    defer_embedding_wgrad_compute: bool = False

    @classmethod
    def of(cls, config: object, layer: str) -> Settings:
        """Return the settings of a configuration object, or the defaults for None.

        Args:
            config: any object; attributes that it lacks have their defaults.
            layer: who asks, for the error.

        Raises:
            ContractRuntimeError: it asks for what these layers do not have.
        """
        names = [one.name for one in fields(cls)]
        settings = cls(**{name: getattr(config, name) for name in names if hasattr(config, name)})
        refused = [
            f"{layer}: {name} is set, but {reason}, which namedmesh's layers do not call; set {name}=False"
            for name, reason in ABSENT.items()
            if getattr(settings, name)
        ]
        if refused:
            raise ContractRuntimeError(*refused)
        return settings

    def recipe(self, initialize: Initializer, stride: int = 1) -> Recipe:
        """Return how a layer of these settings makes its parameters."""
        return Recipe(
            initialize,
            dtype=self.params_dtype,
            drawn_in=torch.float32,  # whatever the dtype is: the same numbers, rounded
            device=None if self.use_cpu_initialization else _accelerator(),
            stride=stride,
            fill=self.perform_initialization,
        )


def _accelerator() -> torch.device | None:
    """Return the current accelerator, if this is where the ranks compute."""
    if dist.is_initialized():
        kind = default_group_device().type
    else:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    return None if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
