"""How plain tensors with attributes of Megatron-LM, DeepSpeed and fairscale are sharded."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from namedmesh import _sharding as sharding

SOURCE = Path(sharding.__file__).parent
ATTRIBUTES = {
    "tensor_model_parallel",
    "model_parallel",
    "partition_dim",
    "partition_stride",
    "allreduce",
    "shared",
    "ds_pipe_replicated",
}


def test_one_module_reads_the_attributes_of_parameters() -> None:
    readers = set()
    for path in SOURCE.rglob("*.py"):
        if "compat" in path.parts:  # upstream's own functions, which read what upstream reads
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in {"getattr", "hasattr"}:
                continue
            if isinstance(node.args[1], ast.Constant) and node.args[1].value in ATTRIBUTES:
                readers.add(path.name)
    assert readers == {"_sharding.py"}


@pytest.mark.parametrize(
    ("attributes", "axes"),
    [
        ({}, []),
        ({"tensor_model_parallel": True}, ["tp"]),
        ({"model_parallel": True}, ["tp"]),
        ({"allreduce": False}, ["ep"]),
        ({"allreduce": False, "tensor_model_parallel": True}, ["ep", "etp"]),
        ({"allreduce": True, "tensor_model_parallel": False}, []),
    ],
)
def test_attributes_name_the_axes_that_shard_a_parameter(
    attributes: dict[str, bool], axes: list[str]
) -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    vars(param).update(attributes)
    assert sharding.find_attribute_axes(param) == axes
    assert sharding.find_placements(param) is None


@pytest.mark.parametrize("attribute", ["shared", "ds_pipe_replicated"])
def test_a_copy_of_another_stage_has_an_attribute(attribute: str) -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    assert not sharding.is_copy_of_stage(param)
    vars(param)[attribute] = True
    assert sharding.is_copy_of_stage(param)
