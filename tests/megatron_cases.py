"""Configurations of Megatron's parallel state, and everything that it answers about one rank."""

from __future__ import annotations

import re
from functools import cache
from inspect import signature
from itertools import product
from typing import TYPE_CHECKING, Any

from legacy import comparable, outcome

if TYPE_CHECKING:
    import random

LARGEST = 96
"""The most ranks of a case: the originals make every group of every rank."""
ORDERS = (
    "tp-cp-ep-dp-pp cp-tp-dp-ep-pp dp-tp-cp-ep-pp tp-ep-dp-cp-pp tp-cp-ep-pp-dp tp-pp-dp-cp-ep TP-CP-EP-DP-PP"
)


def middle_and_last(pp_ranks: list[int]) -> list[int]:
    """Embeddings where no default puts them, in an order that is not ascending."""
    return list(dict.fromkeys([pp_ranks[-1], pp_ranks[len(pp_ranks) // 2]]))


def last_only(pp_ranks: list[int]) -> list[int]:
    """Position embeddings on the last stage."""
    return [pp_ranks[-1]]


AXES = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel", "expert_model_parallel")


def asked(tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, **more: Any) -> dict[str, Any]:
    """What ``initialize_model_parallel`` is asked for; ``etp`` is short for its last size."""
    sizes = dict(zip((f"{axis}_size" for axis in AXES), (tp, pp, cp, ep), strict=True))
    return {**sizes, "expert_tensor_parallel_size": more.pop("etp", None), **more}


def random_case(random_: random.Random, *, newest: bool = False) -> tuple[int, int, dict[str, Any]]:
    """A world, the first rank of the mesh and arguments; Megatron refuses about one in four."""
    tp, pp, cp = (random_.choice((1, 2, 3, 4)) for _ in range(3))
    gtp, egtp = (random_.choice((1, 1, 1, 1, 2, 3)) if newest else 1 for _ in range(2))
    dp = random_.choice((1, 2, 3, 4, 6))
    world = tp * gtp * pp * cp * dp
    if world > LARGEST:
        return random_case(random_, newest=newest)
    rest = world // pp
    ep = random_.choice([size for size in (1, 1, 2, 3, 4, 6, 8) if rest % size == 0])
    etp = random_.choice([None, *(size for size in (1, 2, 4) if rest % (ep * size) == 0)])
    edp = rest // (ep * (tp if etp is None else etp))
    instances = [size for size in (2, 3, 4) if dp * cp % size == 0 and edp % size == 0]
    orders = ORDERS.split()
    # Only a pipeline of one stage goes with every order.
    order = random_.choice(orders if pp == 1 or random_.random() < 0.2 else orders[:4])
    arguments = asked(tp, pp, cp, ep, etp=etp, order=order, create_gloo_process_groups=False)
    arguments["hybrid_context_parallel"] = dp * cp % 2 == 0 and random_.random() < 0.4
    if instances and random_.random() < (0.2 if newest else 0.6):
        arguments["num_distributed_optimizer_instances"] = random_.choice(instances)
    if pp > 1 and random_.random() < 0.4:
        arguments["virtual_pipeline_model_parallel_size"] = random_.choice((2, 3))
    if random_.random() < 0.5:
        arguments["hierarchical_context_parallel_sizes"] = {1: [1], 2: [2, 1], 3: [3], 4: [2, 2]}[cp]
    if random_.random() < 0.3:
        arguments["get_embedding_ranks"] = middle_and_last
    if random_.random() < 0.3:
        arguments["get_position_embedding_ranks"] = last_only
    if not newest:
        return world, 0, arguments | {"create_all_gather_group": random_.random() < 0.3}
    arguments |= {"gtp_remat_size": gtp, "expert_gtp_remat_size": egtp if edp % egtp == 0 or egtp == 3 else 1}
    before, after = random_.choice(((0, 0), (0, 4), (3, 0), (5, 2)))
    if before or after:
        arguments |= {"rank_offset": before, "local_world_size": world}
    return world + before + after, before, arguments


OFF = (
    "with_context_parallel with_egtp_remat partial_data_parallel independent_all_gather "
    "partial_expert_data_parallel tp_only_amax_red"
)
FLAGS = dict.fromkeys(OFF.split(), (False, True)) | {
    **dict.fromkeys(("check_initialized", "with_gtp_remat", "ignore_virtual"), (True, False)),
    "vp_stage": (None, 0, 1, 2),
    "group_size": (2, 4, 6, 8),
}
# Made by torch's version, by the device, or deprecated, and looked at elsewhere.
NO_ANSWERS = {"get_nccl_options", "is_torch_min_version"}
NO_ANSWERS |= {"get_global_memory_buffer", "get_global_symmetric_memory_buffer"}


def getters(module: Any) -> list[str]:
    """The names of its own that answer something; ``install()`` may have added some to an original."""
    prefixes = ("get_", "is_", "model_parallel_is", "has_")
    names = [name for name in dir(module) if name.startswith(prefixes) and name not in NO_ANSWERS]
    return sorted(name for name in names if getattr(module, name).__module__ == module.__name__)


@cache
def _flags(module: Any) -> dict[str, dict[str, tuple[Any, ...]]]:
    """The flags of every accessor, and the values to try."""
    return {
        name: {flag: FLAGS[flag] for flag in signature(getattr(module, name)).parameters}
        for name in getters(module)
    }


def answers(module: Any, original: Any = None) -> dict[str, Any]:
    """What an original's accessors say with every combination of their flags, and its variables; comparable."""
    original = original or module
    told: dict[str, Any] = {}
    for name, flags in _flags(original).items():
        function: Any = getattr(module, name, None)
        for values in product(*flags.values()):
            arguments = dict(zip(flags, values, strict=True))
            told[f"{name}({arguments})"] = outcome(function, **arguments)
    for name in variable_names(original):
        # The list of groups is as long as a rank holds communicators, which is what sharing makes shorter.
        if name != "_global_process_group_list":
            told[name] = comparable(getattr(module, name, None))
    return told


NOT_OWED = {"gtp_remat", "with_egtp_remat"}
"""Arguments of the newest release that only weights gathered for each use (gtp) need."""


def owed(told: Any, newest: bool) -> Any:
    """What our own module answers, too: all that does not come of such weights, which are megatron-core's."""
    if not newest or not isinstance(told, dict):
        return told
    return {name: told[name] for name in told if not re.search(r"^\w*(gtp|GTP)|with_egtp|all_ranks", name)}


def reset(module: Any) -> None:
    """Forget everything: the original's own destruction leaves some variables behind."""
    module.destroy_model_parallel()
    for name in variable_names(module):
        setattr(module, name, {} if name == "_HYBRID_DP_CP_GROUPS" else None)


def variable_names(original: Any) -> list[str]:
    """The module-level variables that an original keeps its answers in."""
    names = []
    for name, value in vars(original).items():
        if re.fullmatch(r"_[A-Z][A-Z_]+|_global_process_group_list", name) and not callable(value):
            names.append(name)
    return names
