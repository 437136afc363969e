"""Two hundred random small modules: refused, trained as in one process, or stopped with the right names."""

from __future__ import annotations

from collections import Counter

import pytest
from ranks import run_ranks
from tp_wirings import Outcome, Wiring, outcome

PARTS, EACH = 4, 50


def outcomes(part: int) -> list[Outcome]:
    return [outcome(Wiring(seed).double()) for seed in range(part * EACH, (part + 1) * EACH)]


@pytest.mark.filterwarnings("ignore:Found a non-scalar tensor")  # torch's, of a gain times a DTensor
@pytest.mark.parametrize("part", range(PARTS))
def test_there_is_no_fourth_outcome(part: int) -> None:
    first, second = run_ranks(2, outcomes, part)
    assert [found.kind for found in first] == [found.kind for found in second]
    kinds = Counter(found.kind for found in first)
    assert kinds.keys() <= {"refused", "right", "stopped"}, [found for found in first if found.detail]
    assert min(kinds["right"], kinds["stopped"]) > EACH // 5  # or else the modules are too much alike
