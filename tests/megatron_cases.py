"""Configurations of Megatron's parallel state, and everything that it answers about one rank."""

from __future__ import annotations

import re
from functools import cache
from inspect import signature
from itertools import product
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    import random

LARGEST = 96
"""The most ranks of a case: the originals make every group of every rank."""
ORDERS = (
    "tp-cp-ep-dp-pp",
    "cp-tp-dp-ep-pp",
    "dp-tp-cp-ep-pp",
    "tp-ep-dp-cp-pp",
    "tp-cp-ep-pp-dp",
    "tp-pp-dp-cp-ep",
    "TP-CP-EP-DP-PP",
)


def middle_and_last(pp_ranks: list[int]) -> list[int]:
    """Embeddings where no default puts them, in an order that is not ascending."""
    return list(dict.fromkeys([pp_ranks[-1], pp_ranks[len(pp_ranks) // 2]]))


def last_only(pp_ranks: list[int]) -> list[int]:
    """Position embeddings on the last stage."""
    return [pp_ranks[-1]]


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
    # Only a pipeline of one stage goes with every order.
    order = random_.choice(ORDERS if pp == 1 or random_.random() < 0.2 else ORDERS[:4])
    arguments: dict[str, Any] = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp,
        "order": order,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "hybrid_context_parallel": dp * cp % 2 == 0 and random_.random() < 0.4,
        "create_gloo_process_groups": False,
    }
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


FLAGS = (
    ("check_initialized", (True, False)),
    ("with_context_parallel", (False, True)),
    ("with_gtp_remat", (True, False)),
    ("with_egtp_remat", (False, True)),
    ("partial_data_parallel", (False, True)),
    ("independent_all_gather", (False, True)),
    ("partial_expert_data_parallel", (False, True)),
    ("tp_only_amax_red", (False, True)),
    ("ignore_virtual", (True, False)),
    ("vp_stage", (None, 0, 1, 2)),
    ("group_size", (2, 4, 6, 8)),
)


def getters(module: Any) -> list[str]:
    """The names of its own that answer something; ``install()`` may have added some to an original."""
    prefixes = ("get_", "is_", "model_parallel_is", "has_")
    names = [name for name in dir(module) if name.startswith(prefixes) and name not in NO_ANSWERS]
    return sorted(name for name in names if getattr(module, name).__module__ == module.__name__)


# Made by torch's version, by the device, or deprecated, and looked at elsewhere.
NO_ANSWERS = {
    "get_nccl_options",
    "get_global_memory_buffer",
    "get_global_symmetric_memory_buffer",
    "is_torch_min_version",
}


@cache
def _flags(module: Any) -> dict[str, list[tuple[str, tuple[Any, ...]]]]:
    """The flags of every accessor, and the values to try."""
    found = {}
    for name in getters(module):
        known = signature(getattr(module, name)).parameters
        found[name] = [(flag, values) for flag, values in FLAGS if flag in known]
        assert {flag for flag, _ in found[name]} == set(known), name
    return found


def answers(module: Any, original: Any = None) -> dict[str, Any]:
    """What every accessor of an original says with every combination of its flags; comparable."""
    told: dict[str, Any] = {}
    for name, flags in _flags(original or module).items():
        function = getattr(module, name)
        for values in product(*(values for _, values in flags)):
            arguments = dict(zip((flag for flag, _ in flags), values, strict=True))
            told[f"{name}({arguments})"] = _told(function, arguments)
    return told


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


def variables(module: Any, original: Any) -> dict[str, Any]:
    """The module-level variables of an original; comparable."""
    # The list of groups is as long as a rank holds communicators, which is what sharing makes shorter.
    names = [name for name in variable_names(original) if name != "_global_process_group_list"]
    return {name: comparable(getattr(module, name)) for name in names}


def kind_of(error: BaseException) -> type[BaseException]:
    """The builtin type of an error."""
    return next(
        kind for kind in type(error).__mro__ if kind.__module__ == "builtins" and kind is not Exception
    )


def _told(function: Any, arguments: dict[str, Any]) -> Any:
    try:
        return comparable(function(**arguments))
    except Exception as error:  # noqa: BLE001  which one is what is compared
        return ("raises", kind_of(error).__name__)


def comparable(value: Any) -> Any:
    """Groups by their ranks."""
    if isinstance(value, dist.ProcessGroup):
        return ("group", dist.get_process_group_ranks(value))
    if isinstance(value, (list, tuple)):
        return [comparable(each) for each in value]
    if isinstance(value, dict):
        return {key: comparable(each) for key, each in value.items()}
    if value is None or isinstance(value, (int, str, bool)):
        return value
    return type(value).__name__
