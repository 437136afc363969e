"""DeepSpeed's topologies from a layout, against DeepSpeed's own."""

from __future__ import annotations

import importlib
import inspect
import random
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
from installing import interpreter
from megatron_cases import kind_of
from messages import refuses, says

from namedmesh import Layout, LayoutError, NamedMeshError
from namedmesh.compat.deepspeed import topology
from namedmesh.compat.deepspeed.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

if TYPE_CHECKING:
    from collections.abc import Callable

TOPOLOGIES = 220
# Names that a mesh has other words for, that its functions take as arguments, and that tuples have as methods.
NAMES = ("pipe", "data", "model", "pp", "dp", "tp", "expert", "device", "layout", "self", "a", "x1", "slice")


@pytest.fixture
def theirs() -> Any:
    return importlib.import_module("deepspeed.runtime.pipe.topology")


def comparable(value: Any) -> Any:
    """Coordinates of either side by their names and numbers."""
    if hasattr(value, "_asdict"):
        return ("coord", type(value).__name__, value._asdict())
    if isinstance(value, dict):
        return [(comparable(key), each) for key, each in value.items()]
    return value


def told(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a call answers, or the builtin type of what it raises."""
    try:
        return comparable(function(*args, **kwargs))
    except Exception as error:  # noqa: BLE001  which one is what is compared
        return kind_of(error)


Question: TypeAlias = "tuple[str, tuple[Any, ...], dict[str, Any]]"


def question(name: str, *args: Any, **kwargs: Any) -> Question:
    return name, args, kwargs


def answer(topo: Any, asked: Question) -> Any:
    """What a topology says, or the builtin type of what it raises."""
    name, args, kwargs = asked
    return told(lambda: getattr(topo, name)(*args, **kwargs))


def questions(source: random.Random, axes: list[str], dims: list[int]) -> list[Question]:
    """What is asked of a topology: sensible things, and others."""
    world = prod(dims)
    asked = [question("get_axis_names"), question("world_size"), question("__str__")]
    for rank in (0, world - 1, source.randrange(world), -1, world, world + 7, 0.0, 1.5, "0", None, True):
        asked += [question("get_coord", rank), question("get_coord", rank=rank)]
        asked += [
            question("get_rank_repr", rank, omit_axes=omit)
            for omit in ([], ["data", "pipe"], axes[:1], axes, ("nothing",), "data", None)
        ]
        asked += [
            question("get_rank_repr", rank, inner_sep="=", outer_sep=", "),
            question("get_rank_repr", rank=rank),
        ]
    for axis in [*axes, "data", "nothing", None, 3]:
        asked += [question("get_dim", axis), question("get_axis_comm_lists", axis)]
        asked += [question("get_axis_list", axis=axis, idx=at) for at in (-1, 0, 1, 2, 9, 1.0, "0", None)]
    for _ in range(12):
        at: dict[str, Any] = {
            axis: source.choice([*range(dim), *range(dim), -1, dim, 0.0, "0"])
            for axis, dim in source.sample(list(zip(axes, dims, strict=True)), len(axes))
        }
        some = dict(source.sample(list(at.items()), source.randint(0, len(at))))
        strange = {**some, "nothing": 0}
        swapped = {**dict(list(at.items())[1:]), "nothing": 0}
        for which in (at, some, strange, swapped, {"nothing": 0, **some}):
            if "self" not in which:  # a keyword that no method can take
                asked += [question("get_rank", **which), question("filter_match", **which)]
    return asked


def random_shape(source: random.Random) -> tuple[list[str], list[int]]:
    while True:
        axes = source.sample(NAMES, source.randint(1, 5))
        dims = [source.choice((1, 1, 2, 2, 3, 4, 5, 7)) for _ in axes]
        if prod(dims) <= 240:
            return axes, dims


@pytest.mark.oracle("deepspeed")
def test_the_same_answers_in_random_topologies(theirs: Any) -> None:
    source = random.Random(11)
    refused: set[Any] = set()
    answered = 0
    for _ in range(TOPOLOGIES):
        axes, dims = random_shape(source)
        both = [module.ProcessTopology(list(axes), list(dims)) for module in (theirs, topology)]
        for name in ("axes", "dims", "mapping"):
            assert comparable(getattr(both[1], name)) == comparable(getattr(both[0], name))
        for asked in questions(source, axes, dims):
            original, ours = (answer(topo, asked) for topo in both)
            assert ours == original, (axes, dims, asked)
            if isinstance(original, type):
                refused.add(original)
            else:
                answered += 1
    assert refused >= {ValueError, AssertionError, AttributeError, TypeError}
    assert answered > 100 * TOPOLOGIES


@pytest.mark.oracle("deepspeed")
def test_the_same_named_topologies(theirs: Any) -> None:
    for pp, mp, dp in product((1, 2, 3), repeat=3):
        pairs = [
            [module.PipeDataParallelTopology(num_pp=pp, num_dp=dp) for module in (theirs, topology)],
            [module.PipeModelDataParallelTopology(pp, mp, dp) for module in (theirs, topology)],
        ]
        for original, ours in pairs:
            assert str(ours) == str(original)
            assert (ours.axes, ours.dims) == (original.axes, original.dims)


@pytest.mark.oracle("deepspeed")
def test_the_same_names_and_arguments(theirs: Any) -> None:
    for name in ("ProcessTopology", "PipeDataParallelTopology", "PipeModelDataParallelTopology"):
        ours, original = getattr(topology, name), getattr(theirs, name)
        public = {key for key in vars(original) if not key.startswith("_")}
        assert public <= set(dir(ours))
        for key in {*public, "__init__"}:
            expected = inspect.signature(getattr(original, key)).parameters
            got = inspect.signature(getattr(ours, key)).parameters
            assert list(got) == list(expected), (name, key)
            defaults = [
                [list(p.default) if isinstance(p.default, tuple) else p.default for p in each.values()]
                for each in (got, expected)
            ]
            assert defaults[0] == defaults[1]
    assert list(inspect.signature(topology._prime_factors).parameters) == ["N"]


@pytest.mark.oracle("deepspeed")
def test_the_same_prime_factors(theirs: Any) -> None:
    for number in range(-2, 600):
        assert told(topology._prime_factors, number) == told(theirs._prime_factors, number)


CONSTRUCTED: tuple[tuple[Any, Any, str], ...] = (
    (
        ["a", "a"],
        [2, 2],
        "axes ['a', 'a'] cannot be the fields of a coordinate: Encountered duplicate field name: 'a'; rename one",
    ),
    (["for", "b"], [2, 2], "axes ['for', 'b'] cannot be ... a keyword: 'for'; rename one"),
    (["_a", "b-c"], [2, 2], "axes ['_a', 'b-c'] cannot be ...; rename one"),
    ([1], [2], "axes [1] cannot be ...; rename one"),
    (["a", "b"], [2], "2 axes ['a', 'b'] but 1 dims [2]; give one size for each axis"),
    (["a", "b"], [2, 1.5], "the dims [2, 1.5] have 1.5; a size is an int"),
    (["a"], ["2"], "the dims ['2'] have '2'; a size is an int"),
    (["a"], [None], "the dims [None] have None; a size is an int"),
    ("ab", [2, 2], "axes is the string 'ab'; give a list with one name for each axis"),
)


@pytest.mark.oracle("deepspeed")
@pytest.mark.parametrize(("axes", "dims", "text"), CONSTRUCTED)
def test_what_cannot_be_made_has_the_original_s_type(theirs: Any, axes: Any, dims: Any, text: str) -> None:
    del text
    original = told(theirs.ProcessTopology, axes, dims)
    assert isinstance(original, type)
    assert told(ProcessTopology, axes, dims) is original


@pytest.mark.parametrize(("axes", "dims", "text"), CONSTRUCTED)
def test_what_cannot_be_made_is_explained(axes: Any, dims: Any, text: str) -> None:
    with pytest.raises(NamedMeshError, match=says(text)):
        ProcessTopology(axes, dims)


@pytest.mark.parametrize(
    ("axes", "dims", "text"),
    [
        (["a", "b"], [2, 0], "axis 'b' has size 0; ..."),
        (["a", "b"], [-1, 2], "axis 'a' is -1, ..."),
        (["a"], [2, 3], "1 ... 2 ..."),
        ([], [], "no axis is named; ..."),
    ],
)
def test_what_the_original_makes_nonsense_of_is_refused(axes: Any, dims: Any, text: str) -> None:
    with pytest.raises(LayoutError, match=says(text)):
        ProcessTopology(axes, dims)


def test_mistakes_are_explained() -> None:
    topo = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=3)
    mistakes: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (
            lambda: topo.get_rank(pipe=1, data=0),
            ValueError,
            "get_rank() got 2 coordinates, pipe=1, data=0, for pipe=2 x data=3 x model=2; give one for each axis, or ask "
            "filter_match() for all ranks that share some",
        ),
        (
            lambda: topo.get_rank(pipe=1, data=0, modle=1),
            TypeError,
            "axis 'modle' is not one of ('pipe', 'data', 'model'); did you mean 'model'?",
        ),
        (
            lambda: topo.get_rank(pipe=2, data=0, model=-1),
            AssertionError,
            "the coordinates pipe=2, data=0, model=-1 are outside of pipe=2 x data=3 x model=2; those of an axis are 0 to "
            "its size - 1",
        ),
        (
            lambda: topo.get_coord(12),
            ValueError,
            "rank 12 is not in the topology of pipe=2 x data=3 x model=2; its ranks are 0 to 11",
        ),
        (lambda: topo.filter_match(stage=0), AttributeError, "axis 'stage' ... ('pipe', 'data', 'model')"),
        (lambda: topo.get_axis_list("dada", 0), ValueError, "axis 'dada' ...; did you mean 'data'?"),
        (
            lambda: topology._prime_factors(0),
            ValueError,
            "0 has no prime factors; give a number of at least 1",
        ),
    ]
    for call, kind, text in mistakes:
        refuses(call, kind, text)


def test_the_worked_examples() -> None:
    topo = ProcessTopology(axes=["pipe", "data", "model"], dims=[2, 2, 2])
    assert topo.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topo.filter_match(pipe=0, data=1) == [2, 3]
    assert ProcessTopology(["a", "b"], [2, 2]).get_rank_repr(3) == "a_01-b_01"
    assert topo.layout == Layout(pp=2, dp=2, tp=2)
    assert (
        repr(PipeDataParallelTopology(2, 4)) == "PipeDataParallelTopology(axes=['pipe', 'data'], dims=[2, 4])"
    )


def test_a_million_ranks_without_a_dictionary_of_them() -> None:
    class Watched(PipeModelDataParallelTopology):
        """Counts its coordinates, and does not let its mapping be read."""

        made = 0

        def __init__(self, *dims: int) -> None:
            super().__init__(*dims)
            kind = self.ProcessCoord

            def counting(*at: int) -> Any:
                Watched.made += 1
                return kind(*at)

            self.ProcessCoord = counting

        @property
        def mapping(self) -> Any:
            raise AssertionError("the mapping of the world was read")

    topo = Watched(16, 8, 8192)
    assert topo.world_size() == 1_048_576
    coord = topo.get_coord(777_777)
    assert topo.get_rank(**coord._asdict()) == 777_777
    assert topo.get_rank_repr(777_777, omit_axes=[]) == "pipe_11-data_7110-model_01"
    groups = topo.get_axis_comm_lists("pipe")
    assert (len(groups), groups[-1][-1], groups[1][:2]) == (65_536, 1_048_575, [1, 65_537])
    assert topo.filter_match(pipe=1, model=3)[:2] == [65_539, 65_547]
    assert len(topo.get_axis_list("data", 8191)) == 128
    assert repr(topo) == "Watched(axes=['pipe', 'data', 'model'], dims=[16, 8192, 8])"
    assert Watched.made == 2
    with pytest.raises(AssertionError, match="the mapping of the world was read"):
        str(topo)


def test_the_mapping_is_made_once_and_in_order() -> None:
    topo = ProcessTopology(["x", "y"], [2, 3])
    assert "mapping" not in vars(topo)
    assert list(topo.mapping.values()) == list(range(6))
    assert topo.mapping is topo.mapping
    assert topo.mapping[topo.ProcessCoord(x=1, y=2)] == 5
    at: Any = (1, 0)  # a coordinate is a tuple
    assert topo.mapping[at] == 3


def test_topologies_do_not_import_torch() -> None:
    code = (
        "import sys; from namedmesh.compat.deepspeed import ProcessTopology; "
        "from namedmesh.compat.deepspeed.topology import _prime_factors; "
        "ProcessTopology(['x'], [2]).get_coord(1); sys.exit('torch' in sys.modules)"
    )
    assert interpreter("-c", code).returncode == 0
