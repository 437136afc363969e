"""A batch on its way through a pipeline: its rows, those of its micro-batches, and what the last stage makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from namedmesh._torch import tree_leaves


@dataclass
class Built:
    """One of torch's schedules, and what it was built for."""

    key: object
    rows: int  # of one micro-batch
    stages: list[PipelineStage]
    schedule: Any
    # Whether the output of the last stage has a tensor without the rows of the micro-batch, such as an auxiliary loss.
    rowless: bool = False


@dataclass
class Batch:
    """One call of ``step`` or ``eval``. torch hands it on to the loss of each micro-batch."""

    target: Any
    count: int  # the rows that the batch has
    slots: int  # the rows of all micro-batches together, which may be more
    built: Built
    backward: bool
    is_first_run: bool
    checks_reduction: bool
    # What the last stage finds wrong in a first run, for all ranks to raise.
    problems: list[str] = field(default_factory=list)
    reduction_problem: str = ""


def count_rows(args: tuple[Any, ...], by_row: dict[str, Any], target: Any) -> tuple[int, list[str]]:
    """Return the number of rows that a batch has, and what keeps it from being cut into micro-batches."""
    named = {f"argument {position}": value for position, value in enumerate(args)}
    named |= by_row
    named["target"] = target
    counts: set[int] = set()
    problems: list[str] = []
    for name, value in named.items():
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                counts.add(leaf.shape[0] if leaf.ndim else 0)
            elif any(isinstance(attribute, Tensor) for attribute in getattr(leaf, "__dict__", {}).values()):
                # torch would give it whole to every micro-batch, or cut a BlockMask by other rows than ours.
                problems.append(
                    f"{name} is a {type(leaf).__name__}, which cannot be cut into micro-batches; give tensors, or a "
                    "keyword argument that is named in pipeline(..., whole=...)"
                )
    if len(counts) != 1 or not args or 0 in counts:
        remedy = (
            "give all as many, one at least; name keyword arguments without rows in pipeline(..., whole=...)"
        )
        problems.append(f"the batch has {sorted(counts)} rows; {remedy}")
    return max(counts, default=0), problems


def rowless_problems(count: int, slots: int, target: Any) -> list[str]:
    """Return why an output with tensors without rows cannot be had for a batch, if it cannot."""
    if target is not None and count == slots:
        return []
    problem = (
        "the last stage returns a tensor without the rows of its micro-batch, which can be neither cut nor joined; give "
        "a target, and as many rows as fill the micro-batches, or return tensors with rows"
    )
    return [problem]


def describe(value: Any, *, skipped_dims: int) -> object:
    """Return what the shapes between stages may depend on of an argument; of other values than tensors by their types."""
    if isinstance(value, Tensor):
        return value.shape[skipped_dims:], value.dtype, value.requires_grad
    if value is None or isinstance(value, bool | str):
        return value
    return type(value)


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def take_rows(index: Tensor, value: Any) -> Any:
    """Return the rows of a tensor with these numbers; other values as they are."""
    return value[index.to(value.device)] if isinstance(value, Tensor) else value


def cut_rows(first: int, size: int, value: Any) -> Any:
    """Return ``size`` rows of a tensor from ``first`` on; other values as they are."""
    return value[first : first + size] if isinstance(value, Tensor) else value


def twice(value: Any) -> Any:
    """Return the rows of a tensor twice; other values as they are."""
    return torch.cat([value, value]) if isinstance(value, Tensor) else value


@contextmanager
def stage_hooks(modules: list[nn.Module], batch: Batch, whole: dict[str, Any]) -> Iterator[None]:
    """Give the stages of one batch the keyword arguments that are not cut, and look at the output of a first run.

    torch is not given them: it drops the gradients of all arguments that it knows after each micro-batch.
    """
    handles: list[Any] = []
    if whole:
        add = partial(_add_arguments, whole)
        handles.extend(module.register_forward_pre_hook(add, with_kwargs=True) for module in modules)
    if batch.is_first_run and batch.built.stages[-1].is_last:
        handles.append(modules[-1].register_forward_hook(partial(_check_output, batch)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _add_arguments(whole: dict[str, Any], _module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, kwargs | whole


def _check_output(batch: Batch, _module: nn.Module, _args: Any, output: Any) -> Any:
    """Return the output of the last stage, or in place of one that torch stumbles over, one that it takes."""
    parts = output if isinstance(output, tuple | list) else [output]
    if not all(isinstance(part, Tensor) for part in parts):
        if not batch.problems:
            shown = type(output).__name__
            batch.problems.append(
                f"the last stage must return a tensor, or a tuple of tensors, got {shown}; take the tensors out of it"
            )
        return tuple(tensors_of(output))
    rows = batch.built.rows
    if any(part.ndim == 0 or part.shape[0] != rows for part in parts):
        batch.built.rowless = True
        problems = rowless_problems(batch.count, batch.slots, batch.target)
        if problems:
            batch.problems[:] = problems
            return tuple(part.reshape(-1) for part in parts)
    return output
