"""Experts on ranks of their own: losses and gradients of the example are those of one process, whatever the layout."""

from __future__ import annotations

import moe
import pytest
from ranks import run_ranks

import namedmesh

# Of the mesh over pp, dp and tp, and of the view over pp, edp, ep and etp.
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "ep1": ({"pp": 1, "dp": 8, "tp": 1}, {"ep": 1, "etp": 1}),
    "ep2": ({"pp": 1, "dp": 8, "tp": 1}, {"ep": 2, "etp": 1}),
    "ep4": ({"pp": 1, "dp": 8, "tp": 1}, {"ep": 4, "etp": 1}),
    "ep8": ({"pp": 1, "dp": 8, "tp": 1}, {"ep": 8, "etp": 1}),
    "tp2 ep2": ({"pp": 1, "dp": 4, "tp": 2}, {"ep": 2, "etp": 1}),
    "tp2 ep8": ({"pp": 1, "dp": 4, "tp": 2}, {"ep": 8, "etp": 1}),
    "tp2 ep2 etp2": ({"pp": 1, "dp": 4, "tp": 2}, {"ep": 2, "etp": 2}),
    "tp2 ep4 etp2": ({"pp": 1, "dp": 4, "tp": 2}, {"ep": 4, "etp": 2}),
    "pp2 ep1": ({"pp": 2, "dp": 4, "tp": 1}, {"ep": 1, "etp": 1}),
    "pp2 ep2": ({"pp": 2, "dp": 4, "tp": 1}, {"ep": 2, "etp": 1}),
    "pp2 ep4": ({"pp": 2, "dp": 4, "tp": 1}, {"ep": 4, "etp": 1}),
    "pp2 tp2 ep4": ({"pp": 2, "dp": 2, "tp": 2}, {"ep": 4, "etp": 1}),
    "pp2 tp2 ep2 etp2": ({"pp": 2, "dp": 2, "tp": 2}, {"ep": 2, "etp": 2}),
}


def compare(layouts: list[str]) -> dict[str, dict[str, float]]:
    told = {}
    for name in layouts:
        dense, expert = LAYOUTS[name]
        mesh = namedmesh.init_mesh(**dense)
        mesh.add_view("expert", pp=dense["pp"], edp=-1, **expert)
        told[name] = moe.differences(mesh)
        mesh.close()
    return told


@pytest.mark.parametrize("pp", [1, 2])
def test_experts_are_those_of_one_process(pp: int) -> None:
    by_rank = run_ranks(8, compare, [name for name in LAYOUTS if LAYOUTS[name][0]["pp"] == pp])
    for told in by_rank:
        for differences in told.values():
            assert max(differences.values()) < 1e-9, told
