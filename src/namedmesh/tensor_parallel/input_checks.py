"""Check that the ranks of a tensor-parallel group get the same input.

Ranks with different samples would train on a mixture of them silently: a sharded embedding
all-reduces the vectors of different ids, and then all gradients agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from namedmesh._torch import all_gather_object, get_group_by_name, wait_if_async
from namedmesh.errors import GradientError, format_items
from namedmesh.fingerprints import fingerprint
from namedmesh.tensor_parallel.collectives import Group


class NotedInput(NamedTuple):
    """The input of the first layer in a forward, as one rank has it.

    Attributes:
        layer: the name of the layer.
        tolerance: the allowed difference between ranks, relative to the norm.
        fingerprint: the norm and weighted sums of the input.
    """

    layer: str
    tolerance: float
    fingerprint: list[float]


class InputCheck:
    """Compares the input of the first layer in a forward that takes its input replicated.

    Shapes are compared in the first forward, because collectives with different shapes end the
    process or hang. Values are noted in the first two forwards, and compared with the first
    gradients: the first forward of a pipeline stage may be the one in which torch infers shapes, on
    uninitialized memory.

    Args:
        group: the ranks.
        axis: the name of their axis, for messages.
        tolerance: the allowed difference of inputs that are not ids, relative to their norm.

    Attributes:
        noted: the input of the last forward that noted one; None before.
    """

    def __init__(self, group: Group, axis: str, tolerance: float) -> None:
        self.group = group
        self.axis = axis
        self.tolerance = tolerance
        self.noted: NotedInput | None = None
        self.forwards = 0
        self.is_expected = False
        self.hooks: list[Any] = []

    def prepare_forward(self, model: nn.Module) -> None:
        """Install hooks that note the input of a forward, for the first two forwards.

        Call it at the start of each forward. The third call removes the hooks.

        Args:
            model: the model. Every layer that takes a replicated input gets a hook, because any of
                them may run first.
        """
        self.forwards += 1
        self.is_expected = self.forwards <= 2  # noqa: PLR2004  the first two
        if self.forwards == 1:
            for name, module in model.named_modules():
                # Only layers on the fast path have layouts. The input of a layer that all-gathers
                # it differs between ranks.
                layouts = getattr(module, "layouts", None)
                if layouts is not None and layouts.input_dim is None and layouts.group == self.group:
                    hook = partial(self._note_input, name)
                    self.hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        if not self.is_expected:
            while self.hooks:
                self.hooks.pop().remove()

    def _note_input(self, name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the input of the layer that runs first: a pre-hook of every layer.

        Collective in the first forward, in which the shapes are compared.

        Raises:
            GradientError: the shapes differ between ranks.
        """
        if torch.compiler.is_compiling() or not self.is_expected:
            return
        self.is_expected = False
        x = args[0] if args else next(iter(kwargs.values()))
        if isinstance(x, DTensor):
            # Ranks with other shards have other values, as they should.
            if set(x.placements) != {Replicate()}:
                return
            x = x.to_local()
        x = wait_if_async(x)
        if type(x) is not Tensor or x.is_meta:  # Fake tensors have no values.
            return
        # Here all ranks communicate or none does: their models and plans are the same.
        if self.forwards == 1:
            gathered = all_gather_object(get_group_by_name(self.group.name), tuple(x.shape))
            shapes = dict.fromkeys(gathered)
            if len(shapes) > 1:
                raise GradientError(self._format_problem(name, f" (shapes {format_items(shapes)})"))
        # Layers before this one may round differently on each rank. Token ids must be equal.
        tolerance = self.tolerance if x.is_floating_point() else 0.0
        self.noted = NotedInput(name, tolerance, fingerprint(x, (1.0, 0.7, 0.3)))

    def problems(self, noted_by_rank: Sequence[NotedInput | None]) -> list[str]:
        """Return a message if the inputs of the ranks differ (empty if not).

        Args:
            noted_by_rank: the ``noted`` of each rank. A rank may have none, e.g. in compiled code.
        """
        noted = [entry for entry in noted_by_rank if entry is not None]
        if not noted:
            return []
        first = noted[0]
        norm = first.fingerprint[0]
        for values in zip(*(entry.fingerprint for entry in noted), strict=True):
            if max(values) - min(values) > first.tolerance * norm:
                return [self._format_problem(first.layer, "")]
        return []

    def _format_problem(self, name: str, detail: str) -> str:
        """Format the message about the different inputs of a layer."""
        return (
            f"{name or 'the model'}: the {self.group.size} ranks of {self.axis} have different "
            f"inputs{detail}, but must work on the same samples; give their samplers the rank on the "
            f"data axes (training.sampler_kwargs(mesh)), and the same seed to dropout before this layer"
        )
