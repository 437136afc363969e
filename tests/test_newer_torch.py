"""A torch that is newer than those tested, and has moved private names that namedmesh uses."""

from __future__ import annotations

import ast
import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matrix import RELEASES
from ranks import run_ranks

from namedmesh import _torch


def _without(names: dict[Any, str]) -> dict[str, Any]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "namedmesh"]:
        del sys.modules[name]
    for owner, name in names.items():
        delattr(owner, name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        namedmesh = importlib.import_module("namedmesh")
        told = []
        for _ in range(2):
            try:
                namedmesh.init_mesh(tp=2, device="cpu")
            except namedmesh.MeshError as error:
                told.append(str(error))
        adapter = importlib.import_module("namedmesh._torch")
    return {
        "warned": [str(each.message) for each in caught],
        "refused": told,
        "observed": adapter.needs_functional_collectives(torch.ones(1)),
    }


def test_moved_names_are_named_in_one_warning_and_nothing_hangs() -> None:
    names = {dist.distributed_c10d: "_get_default_store", torch._C: "_len_torch_dispatch_stack"}
    remedy = (
        f", which this version of namedmesh needs; it was tested up to torch {_torch.TESTED_UP_TO}: install that one, or "
        "a newer namedmesh"
    )
    torch_has_no = f"torch {torch.__version__} has no "
    for told in run_ranks(2, _without, names, timeout=60):
        assert told == {
            "warned": [
                f"{torch_has_no}distributed_c10d._get_default_store, torch._C._len_torch_dispatch_stack{remedy}"
            ],
            "refused": [f"{torch_has_no}distributed_c10d._get_default_store{remedy}"] * 2,
            "observed": True,  # as if somebody kept every result: right, and slower
        }


def test_every_private_function_of_torch_is_declared_where_it_is_used() -> None:
    used: set[str] = set()
    declared: set[Any] = set()
    for node in ast.walk(ast.parse(Path(_torch.__file__).read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "requires_private"
        ):
            declared |= {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in {"c10d", "torch._C"}:
            used.add(node.attr)
    private = {name for name in used if name.startswith("_")}
    # Written, and only where torch is older.
    assert private - declared == {"_hash_ranks_to_str", "_c10d_functional"} & private
    assert len(private) > 5


def test_the_newest_release_that_is_tested_stands_in_one_place() -> None:
    assert RELEASES[-1].startswith(f"{_torch.TESTED_UP_TO}.")
