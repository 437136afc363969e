"""Configurations of Megatron's parallel state, and all collect_answers of its accessors on one rank."""

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
"""The largest world size of a case, because upstream makes every group of every rank."""
ORDERS = (
    "tp-cp-ep-dp-pp cp-tp-dp-ep-pp dp-tp-cp-ep-pp tp-ep-dp-cp-pp tp-cp-ep-pp-dp tp-pp-dp-cp-ep TP-CP-EP-DP-PP"
)


def middle_and_last(pp_ranks: list[int]) -> list[int]:
    """Embeddings on other stages than by default, in an order that is not ascending."""
    return list(dict.fromkeys([pp_ranks[-1], pp_ranks[len(pp_ranks) // 2]]))


def last_only(pp_ranks: list[int]) -> list[int]:
    """Position embeddings on the last stage."""
    return [pp_ranks[-1]]


AXES = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel", "expert_model_parallel")


def make_arguments(tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, **more: Any) -> dict[str, Any]:
    """Arguments of ``initialize_model_parallel`` from the names of axes."""
    sizes = dict(zip((f"{axis}_size" for axis in AXES), (tp, pp, cp, ep), strict=True))
    return {**sizes, "expert_tensor_parallel_size": more.pop("etp", None), **more}


def random_case(random_: random.Random, *, newest: bool = False) -> tuple[int, int, dict[str, Any]]:
    """A world size, the first rank of the mesh and arguments; Megatron rejects about one in four."""
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
    # Megatron accepts every order only for a pipeline of one stage.
    order = random_.choice(orders if pp == 1 or random_.random() < 0.2 else orders[:4])
    arguments = make_arguments(tp, pp, cp, ep, etp=etp, order=order, create_gloo_process_groups=False)
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


FLAGS_OFF_BY_DEFAULT = (
    "with_context_parallel with_egtp_remat partial_data_parallel independent_all_gather "
    "partial_expert_data_parallel tp_only_amax_red"
)
FLAGS = dict.fromkeys(FLAGS_OFF_BY_DEFAULT.split(), (False, True)) | {
    **dict.fromkeys(("check_initialized", "with_gtp_remat", "ignore_virtual"), (True, False)),
    "vp_stage": (None, 0, 1, 2),
    "group_size": (2, 4, 6, 8),
}
# Their results depend on torch's release or on the device; other tests cover them.
NOT_COMPARED = {"get_nccl_options", "is_torch_min_version"}
NOT_COMPARED |= {"get_global_memory_buffer", "get_global_symmetric_memory_buffer"}


def find_accessors(module: Any) -> list[str]:
    """The names of a module's own accessors, without functions that were imported into it."""
    prefixes = ("get_", "is_", "model_parallel_is", "has_")
    names = [name for name in dir(module) if name.startswith(prefixes) and name not in NOT_COMPARED]
    return sorted(name for name in names if getattr(module, name).__module__ == module.__name__)


@cache
def _flags(module: Any) -> dict[str, dict[str, tuple[Any, ...]]]:
    """The flags of every accessor, and the values to try for each."""
    return {
        name: {flag: FLAGS[flag] for flag in signature(getattr(module, name)).parameters}
        for name in find_accessors(module)
    }


def collect_answers(module: Any, upstream: Any = None) -> dict[str, Any]:
    """The results of upstream's accessors with every combination of flags, and its variables; comparable."""
    upstream = upstream or module
    collected: dict[str, Any] = {}
    for name, flags in _flags(upstream).items():
        function: Any = getattr(module, name, None)
        for values in product(*flags.values()):
            arguments = dict(zip(flags, values, strict=True))
            collected[f"{name}({arguments})"] = outcome(function, **arguments)
    for name in variable_names(upstream):
        # Sharing groups makes the list of this rank's communicators shorter than upstream's.
        if name != "_global_process_group_list":
            collected[name] = comparable(getattr(module, name, None))
    return collected


GTP_ARGUMENTS = {"gtp_remat", "with_egtp_remat"}
"""Arguments of the newest release that are for weights gathered for each use (gtp)."""


def without_gtp(collected: Any, newest: bool) -> Any:
    """The results that our fallback has too: those of gtp need megatron-core."""
    if not newest or not isinstance(collected, dict):
        return collected
    about_gtp = re.compile(r"^\w*(gtp|GTP)|with_egtp|all_ranks")
    return {name: answer for name, answer in collected.items() if not about_gtp.search(name)}


def reset(module: Any) -> None:
    """Destroy the groups and empty every variable; upstream's destruction leaves some behind."""
    module.destroy_model_parallel()
    for name in variable_names(module):
        setattr(module, name, {} if name == "_HYBRID_DP_CP_GROUPS" else None)


def variable_names(upstream: Any) -> list[str]:
    """The module-level variables from which upstream's accessors answer."""
    names = []
    for name, value in vars(upstream).items():
        if re.fullmatch(r"_[A-Z][A-Z_]+|_global_process_group_list", name) and not callable(value):
            names.append(name)
    return names
