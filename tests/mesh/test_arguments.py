"""Functions that work along one axis take the named mesh as well; those that need all axes say so by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from messages import match_message
from ranks import fake_world, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from tp_models import Mlp

import namedmesh
from namedmesh import AxisError, CheckpointError, MeshError, TrainingError, tensor_parallel, training
from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel

HEADS = torch.rand(1, 1, 4, 8)
ANY_OPTIMIZER = torch.optim.SGD([torch.zeros(1)])
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def _compare_mesh_with_axis() -> list[bool]:
    """Results with the named mesh and with the slice, of a world in which every other axis has another size."""
    mesh = namedmesh.init_mesh(dp=1, cp=2, tp=2)
    torch.manual_seed(0)
    whole, x = Mlp(8, 16), torch.rand(2, 8, 8)
    logits, target = torch.rand(4, 6), torch.randint(12, (4,))
    query, key, value = torch.rand(3, 2, 2, 4, 8)
    outputs = []
    tp: Any
    cp: Any
    for tp, cp in ((mesh, mesh), (mesh["tp"], mesh["cp"])):
        model = Mlp(8, 16)
        model.load_state_dict(whole.state_dict())
        report = tensor_parallel.plan_report(model, tp, PLAN)
        namedmesh.parallelize(model, tp, PLAN, check_gradients=False)
        tensor_parallel.register_gradient_check(model, tp)
        shard, positions = training.shard_sequence(x, mesh=cp)
        attended = training.context_attention(query, key, value, cp, is_causal=True)
        loss = tensor_parallel.cross_entropy(logits, target, tp)
        verified = tensor_parallel.verify(whole, tp, PLAN, x).passed
        outputs.append((report, model(x), shard, positions, attended, loss, verified))
    same = [
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(*outputs, strict=True)
    ]
    return [*same, torch.allclose(outputs[0][1], whole(x), atol=1e-6)]


def test_a_named_mesh_gives_the_same_result_as_its_axis() -> None:
    assert run_ranks(4, _compare_mesh_with_axis) == [[True] * 8] * 4


ONE_AXIS: dict[str, Callable[[Any], object]] = {
    "parallelize": lambda mesh: namedmesh.parallelize(Mlp(), mesh, PLAN),
    "plan_report": lambda mesh: tensor_parallel.plan_report(Mlp(), mesh, PLAN),
    "register_gradient_check": lambda mesh: tensor_parallel.register_gradient_check(Mlp(), mesh),
    "verify": lambda mesh: tensor_parallel.verify(Mlp(), mesh, PLAN, torch.rand(1, 8)),
    "cross_entropy": lambda mesh: tensor_parallel.cross_entropy(
        torch.rand(2, 4), torch.zeros(2, dtype=torch.int64), mesh
    ),
    "token_log_probs": lambda mesh: tensor_parallel.token_log_probs(
        torch.rand(2, 4), torch.zeros(2).long(), mesh
    ),
    "logsumexp": lambda mesh: tensor_parallel.logsumexp(torch.rand(2, 4), mesh),
    "entropy": lambda mesh: tensor_parallel.entropy(torch.rand(2, 4), mesh),
    "argmax": lambda mesh: tensor_parallel.argmax(torch.rand(2, 4), mesh),
    "sample": lambda mesh: tensor_parallel.sample(torch.rand(2, 4), mesh),
    "shard_sequence": lambda mesh: training.shard_sequence(torch.rand(1, 8), mesh=mesh),
    "context_attention": lambda mesh: training.context_attention(HEADS, HEADS, HEADS, mesh),
}
NAMED: dict[str, Callable[[Any], object]] = {
    "sampler_kwargs": training.sampler_kwargs,
    "check_same_batch": lambda mesh: training.check_same_batch(1, mesh),
    "fsdp_mesh": training.fsdp_mesh,
    "Throughput": training.Throughput,
    "count_tokens": lambda mesh: training.count_tokens(1, mesh),
    "normalize_loss": lambda mesh: training.normalize_loss(torch.tensor(1.0), torch.tensor(1), mesh),
    "mean_loss": lambda mesh: training.mean_loss(torch.tensor(1.0), mesh),
    "seed_all": lambda mesh: training.seed_all(0, mesh),
    "clip_grad_norm_": lambda mesh: training.clip_grad_norm_([], 1.0, mesh),
    "stage_indices": training.stage_indices,
    "Pipeline": lambda mesh: training.Pipeline(
        nn.Linear(2, 2), mesh, n_microbatches=2, loss_fn=nn.functional.mse_loss
    ),
    "tie_stages": lambda mesh: training.tie_stages(None, None, mesh),
    "sync_found_inf": lambda mesh: training.sync_found_inf(torch.amp.GradScaler("cpu"), ANY_OPTIMIZER, mesh),
    "ExpertParallel": tensor_parallel.ExpertParallel,
}


# These take None, too, in a process without process groups.
WITHOUT: dict[str, Callable[[Any, Any], object]] = {
    "save": lambda path, mesh: training.save(path, mesh, Mlp()),
    "load": lambda path, mesh: training.load(path, mesh, Mlp()),
    "CheckpointManager": training.CheckpointManager,
}


def test_every_public_function_with_a_mesh_argument_is_tested() -> None:
    optional = {*WITHOUT, "stage_layers"}
    taking = set()
    for package in (training, tensor_parallel):
        for name in package.__all__:
            parameters = inspect.signature(getattr(package, name)).parameters
            if "mesh" in parameters or "mesh_or_tp_size" in parameters:
                taking.add(name)
    assert taking == {*ONE_AXIS, *NAMED, *optional}


def test_a_wrong_mesh_argument_is_reported_with_the_function() -> None:
    with fake_world(8):
        torchs = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "xp"))
        for name, call in ONE_AXIS.items():
            text = f"{name} works along one axis, but its mesh is a DeviceMesh of ('dp', 'xp'); give it the NamedMesh, ..."
            with pytest.raises(MeshError, match=match_message(text)):
                call(torchs)
            with pytest.raises(
                MeshError, match=match_message(f"mesh of {name} must be a NamedMesh, or ... got 'tp'")
            ):
                call("tp")
        for name, call in NAMED.items():
            text = f"mesh of {name} must be the NamedMesh, as init_mesh() returns it, got a DeviceMesh of ('dp',); ..."
            with pytest.raises(MeshError, match=match_message(text)):
                call(torchs["dp"])
        for name, save in WITHOUT.items():
            with pytest.raises(
                MeshError, match=match_message(f"mesh of {name} must be the NamedMesh, ... got 1; ...")
            ):
                save("folder", 1)
            text = f"path of {name} must be a directory, got a Mlp; give path and mesh first"
            with pytest.raises(CheckpointError, match=match_message(text)):
                save(Mlp(), 1)
        mesh = namedmesh.init_mesh(dp=8)
        for losses in (2.5, [2.5]):
            text = f"losses must be a tensor or an iterable of tensors, got {losses}; ..."
            with pytest.raises(TrainingError, match=match_message(text)):
                training.mean_loss(losses, mesh)  # type: ignore[arg-type]
        with pytest.raises(
            AxisError,
            match=match_message(
                "axis 'tp' is not one of ('dp',); if the mesh needs no such axis, make it with tp=1"
            ),
        ):
            namedmesh.parallelize(Mlp(), mesh, PLAN)
        with pytest.raises(
            MeshError, match=match_message("mesh of seed_all must be the NamedMesh, ... got 0; ...")
        ):
            training.seed_all(mesh, 0)  # type: ignore[arg-type]
        mesh.close()
