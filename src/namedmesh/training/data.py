"""Which ranks get which samples, the mean over their tokens, and the mesh over which gradients are averaged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch.distributed.tensor import DTensor

from namedmesh._torch import concatenate_meshes, constant_of_mesh
from namedmesh.errors import AgreementError, AxisError, ShapeError, TrainingError, listing
from namedmesh.tensor_parallel.collectives import Group
from namedmesh.tensor_parallel.experts import ExpertForward
from namedmesh.training.comparison import digest
from namedmesh.training.reduction import all_reduced
from namedmesh.training.seeds import derived_seed, streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from namedmesh.mesh import NamedMesh

_DATA = ("dp", "dp_replicate", "dp_shard")
_SAME_SAMPLES = ("pp", "cp", "tp")
_UNREAD = -1  # in place of the hash of a batch


@constant_of_mesh
def data_axes(mesh: NamedMesh) -> tuple[str, ...]:
    """Return the axes along which samples differ: ``dp``, or those of ``dp_replicate`` and ``dp_shard`` that exist.

    Prevents: ranks that draw samples by their global rank, so that the ranks of one tensor-parallel group work
    on different samples and sum what does not belong together.

    Raises:
        AxisError: the mesh has an axis of another name, with more than one rank: whether samples differ along
            it is not known.

    Example:
        >>> import namedmesh, torch.distributed as dist
        >>> from namedmesh import training
        >>> mesh = namedmesh.init_mesh(pp=1, dp_replicate=1, dp_shard=-1, tp=1, device="cpu")
        >>> training.data_axes(mesh)
        ('dp_replicate', 'dp_shard')
        >>> mesh.close(); dist.destroy_process_group()
    """
    known = (*_DATA, *_SAME_SAMPLES)
    problems = [
        f"axis {axis!r} is none of {known}, so it is not known whether samples differ along it; make the mesh with these "
        "names, and add what has others with mesh.add_view(...)"
        for axis, size in mesh.layout.items()
        if size > 1 and axis not in known
    ]
    if problems:
        raise AxisError(*problems)
    return tuple(axis for axis in mesh.layout if axis in _DATA)


@constant_of_mesh
def _token_axes(mesh: NamedMesh) -> tuple[tuple[str, ...], int]:
    """Return the axes along which ranks have different tokens, which are those of samples and cp; and the number of ranks."""
    axes = data_axes(mesh) + (("cp",) if "cp" in mesh.layout else ())
    return axes, mesh.size(*axes) if axes else 1


class SamplerKwargs(TypedDict):
    """What torch's samplers want to know of the mesh."""

    num_replicas: int
    rank: int


def sampler_kwargs(mesh: NamedMesh) -> SamplerKwargs:
    """Return the arguments ``num_replicas`` and ``rank`` of torch's samplers, on this rank.

    Prevents: a sampler left to its defaults, which are those of the default group: every rank gets other
    samples, also those of one tensor-parallel, context-parallel or pipeline group.

    A ``StatefulDataLoader`` takes such a sampler as any loader does.

    Raises:
        AxisError: as for :func:`data_axes`.

    Example:
        On a mesh of ``dp=2, tp=2`` the ranks 0 and 1 get rank 0 of 2, the ranks 2 and 3 rank 1 of 2:

        >>> import torch.distributed as dist
        >>> from torch.utils.data import DistributedSampler
        >>> import namedmesh
        >>> from namedmesh import training
        >>> mesh = namedmesh.init_mesh(dp=-1, tp=1, device="cpu")
        >>> training.sampler_kwargs(mesh)
        {'num_replicas': 1, 'rank': 0}
        >>> list(DistributedSampler(range(3), shuffle=False, **training.sampler_kwargs(mesh)))
        [0, 1, 2]
        >>> mesh.close(); dist.destroy_process_group()
    """
    axes = data_axes(mesh)
    return {
        "num_replicas": mesh.size(*axes) if axes else 1,
        "rank": mesh.rank(*axes) if axes else 0,
    }


def check_same_batch(batch: object, mesh: NamedMesh, *, distinct: bool = True) -> None:
    """Refuse a batch that differs between ranks that must have the same samples, or is another data rank's; communicates.

    Prevents: loaders that shuffle with another seed on each rank, or drop samples on some. The ranks of a
    tensor-parallel group then sum activations of different samples, and the loss goes down all the same.

    Every rank of the mesh calls it, on the batch as it is loaded (before the sequence is sharded over cp). It
    copies the batch to the CPU and hashes it: for the first steps, or every thousandth.

    Args:
        batch: tensors, NumPy arrays and anything else, in dicts, lists, tuples, dataclasses and other objects. None on a rank
            that loads nothing, such as a stage in the middle of a pipeline, which is then not compared.
        mesh: the mesh.
        distinct: whether ranks with other coordinates on the data axes must have other batches.

    Raises:
        AgreementError: on every rank, naming the ranks whose batches differ, or cannot be read.
        AxisError: as for :func:`data_axes`.

    Example:
        >>> import namedmesh, torch, torch.distributed as dist
        >>> from namedmesh import training
        >>> mesh = namedmesh.init_mesh(dp=-1, tp=1, device="cpu")
        >>> training.check_same_batch({"tokens": torch.arange(3), "id": "a"}, mesh)
        >>> mesh.close(); dist.destroy_process_group()
    """
    share, unread = sampler_kwargs(mesh), None
    try:
        mine = 0 if batch is None else digest(batch)
    except Exception as error:  # noqa: BLE001  the others wait
        mine, unread = _UNREAD, error
    # The largest and the smallest of those that must load the same; without a batch, neither.
    bounds = torch.tensor([mine, -mine if mine else -(2**63) + 1], device=mesh.device)
    axes = data_axes(mesh)
    same = [axis for axis in mesh.layout if axis not in axes]
    high, low = all_reduced(bounds, mesh, same, "max").tolist()
    by_share = torch.zeros(share["num_replicas"], dtype=torch.int64)
    by_share[share["rank"]] = high
    shares = [each for each in all_reduced(by_share.to(mesh.device), mesh, axes).tolist() if each]
    wrong = (high > 0 and high != -low) or (distinct and len(set(shares)) < len(shares)) or unread is not None
    if all_reduced(torch.tensor([int(wrong)], device=mesh.device), mesh, mesh.layout.axes, "max").item():
        raise AgreementError(*_differences(mine, mesh, distinct=distinct)) from unread


def _differences(mine: int, mesh: NamedMesh, *, distinct: bool) -> list[str]:
    """Return one sentence for each set of ranks whose batches are not what they must be; communicates."""
    axes, digests = data_axes(mesh), torch.zeros(mesh.size(), dtype=torch.int64)
    digests[mesh.rank()] = mine
    digests = all_reduced(digests.to(mesh.device), mesh, mesh.layout.axes)
    by_rank = dict(zip(mesh.layout.ranks, digests.tolist(), strict=True))
    if unread := [rank for rank, each in by_rank.items() if each == _UNREAD]:
        return [f"ranks {listing(unread)} cannot read their batch; see the cause there"]
    shares: dict[tuple[int, ...], dict[int, list[int]]] = {}
    loaded: dict[int, dict[tuple[int, ...], list[int]]] = {}
    for rank, each in by_rank.items():
        if each:
            coords = mesh.layout.coords(rank)
            share = tuple(coords[axis] for axis in axes)
            shares.setdefault(share, {}).setdefault(each, []).append(rank)
            loaded.setdefault(each, {}).setdefault(share, []).append(rank)
    problems = _groups_in_words(
        shares.values(),
        "different samples, and must load the same; give their samplers sampler_kwargs(mesh) and one seed, and call this before "
        "the sequence is sharded",
    )
    if distinct:
        problems += _groups_in_words(
            loaded.values(),
            "the same samples, and must load different ones; give their samplers sampler_kwargs(mesh), or pass distinct=False where "
            "this is meant",
        )
    return problems


def _groups_in_words(found: Iterable[Mapping[Any, Sequence[int]]], what: str) -> list[str]:
    groups = [[f"ranks {listing(ranks)}" for ranks in each.values()] for each in found if len(each) > 1]
    return [f"{' and '.join(each)} loaded {what}" for each in groups]


class LoaderKwargs(TypedDict):
    """What torch's loaders draw random numbers with."""

    generator: torch.Generator
    worker_init_fn: Callable[[int], None]


def loader_kwargs(mesh: NamedMesh) -> LoaderKwargs:
    """Return the arguments ``generator`` and ``worker_init_fn`` of ``DataLoader``, after :func:`seed_all`.

    Prevents: ``shuffle=True``, and masks that are drawn for samples, with the default numbers, which differ over pp and cp: the
    stages of a pipeline then work on other samples, or on other masks of the same ones. These are the numbers of
    ``streams("data")``, equal over pp, cp and tp; a checkpoint has their place. What is drawn in ``collate_fn`` in the main
    process, with ``num_workers=0``, goes inside ``with training.streams("data")``; in workers torch's, Python's and NumPy's
    default generators are seeded alike.

    Raises:
        TrainingError: :func:`seed_all` was not called.
        AxisError: as for :func:`data_axes`.

    Example:
        >>> import torch.distributed as dist
        >>> from torch.utils.data import DataLoader
        >>> import namedmesh
        >>> from namedmesh import training
        >>> mesh = namedmesh.init_mesh(dp=-1, tp=1, device="cpu")
        >>> training.seed_all(0, mesh)
        >>> loader = DataLoader(range(4), shuffle=True, **training.loader_kwargs(mesh))
        >>> sorted(int(each) for each in loader)
        [0, 1, 2, 3]
        >>> mesh.close(); dist.destroy_process_group()
    """
    data_axes(mesh)
    return {"generator": streams.generator("data"), "worker_init_fn": _seed_worker}


def _seed_worker(_: int) -> None:
    """Make the stream of a worker, where torch has seeded all other generators by that of the loader."""
    streams.reset()
    streams.add("data", derived_seed(torch.initial_seed(), "data"))


def fsdp_mesh(mesh: NamedMesh) -> DeviceMesh:
    """Return the mesh that ``fully_shard(mesh=...)`` wants; communicates the first time, where cp is beside dp.

    Prevents: parameters averaged over ``mesh["dp"]`` in a mesh that has ``cp`` too. The ranks along cp see other
    tokens of the same samples and hold the same parameters; without them in the mean their weights drift apart.

    Without ``dp_replicate`` it is 1-D, over dp (or dp_shard) times cp; with it 2-D, for HSDP. Axes of one rank
    are left out. Parallelize over ``mesh["tp"]`` first, then call ``fully_shard``.

    Where the parameters are DTensors over the whole mesh already, replicated over its data axes, torch 2.13 has
    the better way, which needs no product of axes: ``fully_shard(model, mesh=mesh.device_mesh,
    dp_mesh_dims=DataParallelMeshDims(shard=("dp", "cp")))``, with ``replicate="dp_replicate"`` for HSDP.

    Raises:
        AxisError: there is no axis to shard over; or as for :func:`data_axes`.

    Example:
        On a mesh of ``dp=2, cp=2, tp=2`` the ranks 0, 2, 4 and 6 share parameters:

        >>> import torch, torch.distributed as dist
        >>> from torch.distributed.fsdp import fully_shard
        >>> import namedmesh
        >>> from namedmesh import training
        >>> mesh = namedmesh.init_mesh(dp=-1, cp=1, tp=1, device="cpu")
        >>> training.fsdp_mesh(mesh) is mesh["dp"]
        True
        >>> layer = fully_shard(torch.nn.Linear(2, 2), mesh=training.fsdp_mesh(mesh))
        >>> mesh.close(); dist.destroy_process_group()
    """
    data_axes(mesh)
    shard = [axis for axis in mesh.layout if axis in {"dp", "dp_shard", "cp"}]
    if not shard:
        raise AxisError(
            f"{mesh.layout} has no axis to shard parameters over; make it with one of ('dp', 'dp_shard', 'cp'), if "
            "only of size 1, as in init_mesh(dp_shard=1, ...)"
        )
    sharded = mesh.flatten(*([axis for axis in shard if mesh.size(axis) > 1] or shard[:1]))
    if "dp_replicate" not in mesh.layout or mesh.size("dp_replicate") == 1:
        return sharded
    return concatenate_meshes([mesh["dp_replicate"], sharded])


def token_mean(loss_sum: Tensor, token_count: Tensor | int, mesh: NamedMesh) -> Tensor:
    """Return the mean loss of a token over the whole global batch; communicates.

    Prevents the most common silent bug of the field: each rank takes the mean over its own tokens, and FSDP2 or
    DDP averages those means. With padding or masked prompts the ranks have different numbers of tokens, so that
    a token counts more where there are few; nothing fails, and the loss looks as it always does.

    The gradients, after FSDP2 or DDP averaged them over the ranks of :func:`fsdp_mesh`, are those of one process
    with all the tokens. The ranks along dp and cp have different tokens; those along tp and pp do not count.

    **Micro-batches** that add up to one step: pass each one's own ``loss_sum``, and every time the tokens of all
    of them. The results, and the gradients, then add up to the mean over the whole step. **Pipeline schedules**
    call the loss for each micro-batch, so the same holds there; make the schedule with ``scale_grads=False``, as
    there is nothing left to divide. **With** ``loss_parallel`` pass the DTensor that comes out of it.

    Args:
        loss_sum: the sum of the losses of this rank's tokens (``reduction="sum"``), of no dims.
        token_count: how many they are: the targets that are not ignored. Other ranks may have other numbers.
        mesh: the mesh; every rank along its dp and cp axes calls this.

    Returns:
        A tensor of no dims, the same on all ranks that call, to call ``backward()`` on. It is not a number where
        no token of the whole batch counts, as ``cross_entropy`` has it.

    Raises:
        ShapeError: ``loss_sum`` has dims, so it is no sum.
        AxisError: as for :func:`data_axes`.

    Example:
        Two ranks, one with 3 tokens of loss 1 each and one with a single token of loss 5, get 2.0, and not the
        mean of means, 3.0.

        >>> import torch, torch.distributed as dist
        >>> import torch.nn.functional as F
        >>> import namedmesh
        >>> from namedmesh import training
        >>> mesh = namedmesh.init_mesh(dp=-1, tp=1, device="cpu")
        >>> logits = torch.zeros(4, 10, requires_grad=True)
        >>> targets = torch.tensor([3, -100, 5, -100])
        >>> loss_sum = F.cross_entropy(logits, targets, reduction="sum")
        >>> loss = training.token_mean(loss_sum, (targets != -100).sum(), mesh)
        >>> loss.backward()
        >>> round(loss.item(), 4) == round(F.cross_entropy(logits, targets).item(), 4)
        True
        >>> mesh.close(); dist.destroy_process_group()
    """
    if loss_sum.ndim:
        raise ShapeError(
            f"loss_sum has shape {tuple(loss_sum.shape)}, and must be one number: the sum over this rank's tokens, as "
            'cross_entropy(..., reduction="sum") returns it'
        )
    loss_sum, count = (
        each.full_tensor() if isinstance(each, DTensor) else torch.as_tensor(each, device=loss_sum.device)
        for each in (loss_sum, token_count)
    )
    axes, ranks = _token_axes(mesh)
    together = torch.stack([loss_sum.detach().double(), count.double()])
    total, tokens = all_reduced(together, mesh, axes).unbind()
    # Averaging divides by the number of ranks, so it is multiplied by here.
    scaled = loss_sum.double() * (ranks / tokens)
    # The value of the mean, exactly, with the gradient of the scaled sum.
    return (total / tokens + (scaled - scaled.detach())).to(loss_sum.dtype)


def set_expert_divisor(model: nn.Module, mesh: NamedMesh) -> None:
    """Divide the gradients of a model's experts by as many ranks as all others.

    Prevents: experts that learn faster than the rest of the model. A rank's experts get the tokens of all ranks
    along ep, but FSDP2 and DDP divide the sum of their gradients by the ranks along edp only, while everything
    else is divided by those along dp and cp: the experts' gradients are too large, by the factor ``dp * cp / edp``,
    and nothing fails.

    Call it once, for modules that are parallelized with :class:`namedmesh.tensor_parallel.ExpertParallel`, with or
    without ``fully_shard(experts, mesh=mesh["edp"])`` (over one rank too: a ``fully_shard`` of what is around the
    experts must not take them). It is the same for any precision and backend; leave FSDP2's own
    ``set_gradient_divide_factor`` alone, which in torch up to 2.13 divides twice where edp is 1 and the gradients
    are float16 or float64.

    Args:
        model: the experts, or a model that contains some.
        mesh: a mesh with a view that has ``edp``.

    Raises:
        TrainingError: no module of the model is parallelized with ``ExpertParallel``.
        AxisError: the mesh has no axis ``edp``; or as for :func:`data_axes`.

    Example:
        >>> import namedmesh, torch, torch.distributed as dist
        >>> from namedmesh import training
        >>> from namedmesh.tensor_parallel import ExpertParallel, parallelize
        >>> mesh = namedmesh.init_mesh(dp=-1, device="cpu")
        >>> _ = mesh.add_view("expert", edp=-1, ep=1)
        >>> experts = torch.nn.ParameterDict({"weight": torch.ones(8, 4, 4)})   # with a forward of its own
        >>> experts = parallelize(experts, mesh["ep"], ExpertParallel())
        >>> training.set_expert_divisor(experts, mesh)
        >>> mesh.close(); dist.destroy_process_group()
    """
    scale = mesh.size("edp") / _token_axes(mesh)[1]
    found = [each.forward for each in model.modules() if isinstance(each.forward, ExpertForward)]
    if not found:
        raise TrainingError(
            f"no module of {type(model).__name__} is parallelized with ExpertParallel; call this after "
            'parallelize(model, mesh["ep"], {...: ExpertParallel()}), on every pipeline stage that has experts'
        )
    for forward in found:
        forward.gradient_scale = scale
        forward.compared.append(Group.of(mesh.group("edp")))
