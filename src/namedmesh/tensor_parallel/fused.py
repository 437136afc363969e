"""Split fused linears, which column styles cannot shard as they are.

A rank's shard of a fused linear (q|k|v) would be all of the queries and none of the values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from namedmesh._errors import PlanError
from namedmesh._torch.modules import has_hooks


class ConcatLinear(nn.ModuleList):
    """Linears with the same input and concatenated outputs. Made by :func:`split_linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the linears, concatenated along the last dim.

        Under column styles it is the local shard of each of them, and not a shard of the fused
        output.

        Args:
            x: the input of the fused linear.
        """
        return torch.cat([linear(x) for linear in self], -1)


def split_linear(model: nn.Module, name: str, sizes: Sequence[int]) -> None:
    """Replace a fused linear (q|k|v, gate|up, concatenated) with separate linears.

    The new linears are modules ``{name}.0``, ``{name}.1`` and so on, to be named in a plan. Their
    outputs are concatenated. The model's own ``chunk`` or ``split`` of the output must compute the
    sizes from the shape. Names in the state dict change too: load a checkpoint of the fused linear
    first; to write one, concatenate ``{name}.0.weight`` and the others along dim 0.

    Args:
        model: the model that contains the linear.
        name: the name of the fused linear.
        sizes: the output features of each of the new linears.

    Raises:
        PlanError: the module is not an ``nn.Linear`` with the forward of that class and without
            hooks, its parameters are shared with other modules, or the sizes do not add up to its
            output features.
    """
    fused = model.get_submodule(name)
    if type(fused) is not nn.Linear or sum(sizes) != fused.out_features:
        raise PlanError(
            f"{name} is {fused}; give an nn.Linear and sizes that add up to its out_features, not "
            f"{list(sizes)}"
        )
    params = dict(fused.named_parameters())
    problems = []
    if "forward" in vars(fused) or has_hooks(fused) or any(map(has_hooks, params.values())):
        problems.append(f"{name} has hooks or a forward that the new linears would not have; split it first")
    for fqn, param in model.named_parameters(remove_duplicate=False):
        module_name, _, key = fqn.rpartition(".")
        if param is params.get(key) and model.get_submodule(module_name) is not fused:
            got = f"{name}.{key} is shared with {fqn}, which would keep the fused one"
            problems.append(f"{got}; untie them first")
    if problems:
        raise PlanError(*problems)
    linears = _make_linears(fused, sizes)
    # The fused linear may be registered under several names.
    for fqn, module in list(model.named_modules(remove_duplicate=False)):
        if module is fused:
            model.set_submodule(fqn, linears)


def _make_linears(fused: nn.Linear, sizes: Sequence[int]) -> ConcatLinear:
    """Return linears with the rows of a fused linear and the attributes of its parameters."""
    # On the meta device, because the values of the fused linear replace the initial values.
    linears = ConcatLinear()
    for size in sizes:
        linears.append(nn.Linear(fused.in_features, size, fused.bias is not None, device="meta"))
    for key, fused_param in fused.named_parameters():
        fused_rows = fused_param.detach().split([*sizes])
        for linear, rows in zip(linears, fused_rows, strict=True):
            param = nn.Parameter(rows.clone(), requires_grad=fused_param.requires_grad)
            vars(param).update(vars(fused_param))
            linear.register_parameter(key, param)
    linears.train(fused.training)
    return linears
