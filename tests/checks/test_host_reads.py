"""Each call of a training step reads as many values of the device as the guide lists. The host waits for each read."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from as_cuda import NoReads
from pages import PAGES
from plain_experts import Experts
from ranks import run_ranks
from tensors import random_tensor
from torch import Tensor, nn
from tp_models import Llama, make_llama_plan

import namedmesh
from namedmesh import training
from namedmesh.tensor_parallel import (
    ExpertParallel,
    KeyValueParallel,
    cross_entropy,
    parallelize,
    reduce_gradients,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.ci

LAST = 5  # the ranks compare on calls 1, 2 and 4


class NoCopies(NoReads):
    """Fail if a tensor is made from Python values, as an index that is a list is: a copy to the device in each step."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten.lift_fresh.default, "Python values are copied to the device"
        return super().__torch_dispatch__(func, types, args, kwargs)


def _count_reads_of_a_step() -> dict[str, int]:  # noqa: PLR0915  one call after another
    """Return the number of reads of each call in the last of several steps."""
    reads: dict[str, int] = {}
    calls = Counter[str]()

    def count(name: str, call: Callable[[], Any]) -> Any:
        # On calls that compare, values of the host are sent to the other ranks.
        calls[name] += 1
        mode = NoCopies if calls[name] == LAST else NoReads
        with mode(limit=1000) as seen:
            result = call()
        reads[name] = seen.reads
        return result

    mesh = namedmesh.init_mesh(tp=2)
    model = parallelize(Llama(layers=1), mesh["tp"], make_llama_plan(sequence_parallel=True))
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    clip = partial(training.clip_grad_norm_, params, 1.0, mesh)
    ids = torch.randint(0, 32, (2, 8))
    targets = torch.randint(0, 32, (16,))
    logits = torch.randn(16, 16)
    for _ in range(LAST):
        with mock.patch.object(Tensor, "is_cpu", new=False):  # ids on an accelerator
            tokens = count("count_tokens", partial(training.count_tokens, targets != 3, mesh))
            output = count("a forward", partial(model, ids))
            count("cross_entropy", partial(cross_entropy, logits, targets, mesh["tp"]))
        loss = count("normalize_loss", partial(training.normalize_loss, output.square().sum(), tokens, mesh))
        count("a backward", scaler.scale(loss).backward)
        scaler.unscale_(optimizer)
        count("sync_found_inf", partial(training.sync_found_inf, scaler, optimizer, mesh))
        count("reduce_gradients", partial(reduce_gradients, params))
        count("clip_grad_norm_", clip)
        count("the step of an optimizer", optimizer.step)
        count("mean_loss", partial(training.mean_loss, loss, mesh))
        scaler.update()
    count("clip_grad_norm_(error_if_nonfinite=True)", partial(clip, error_if_nonfinite=True))
    mesh.close()

    mesh = namedmesh.init_mesh(cp=2)
    qkv = random_tensor(3, 1, 2, 8, 4, seed=0)
    shard, _ = count("shard_sequence", partial(training.shard_sequence, qkv, mesh=mesh["cp"], dim=3))
    query, key, value = shard
    count("context_attention", partial(training.context_attention, query, key, value, mesh["cp"]))
    mesh.close()

    mesh = namedmesh.init_mesh(pp=2)
    pipe = training.Pipeline(
        torch.nn.Linear(4, 4), mesh, n_microbatches=2, loss_fn=torch.nn.functional.mse_loss
    )
    rows = torch.ones(4, 4)
    for _ in range(LAST):
        count("Pipeline.step", partial(pipe.step, rows, target=rows))
        count("Pipeline.eval", partial(pipe.eval, rows, target=rows))
    mesh.close()

    mesh = namedmesh.init_mesh(dp=2)
    mesh.add_view("expert", edp=1, ep=2)
    experts = parallelize(Experts(), mesh["ep"], ExpertParallel(mesh))
    counts = torch.full((4,), 2)
    for step in range(LAST):
        tokens = random_tensor(8, 3, seed=2 * step + mesh.rank("dp")).requires_grad_()
        output = count("a forward with ExpertParallel", partial(experts, tokens, counts))
        count("its backward", output.sum().backward)
    mesh.close()
    return reads


def _run_layer_with_shared_heads() -> None:
    """Run a layer whose ranks share 3 kv heads: each one has a head twice, and half of another."""
    mesh = namedmesh.init_mesh(tp=2)
    keys = parallelize(nn.Sequential(nn.Linear(8, 12)), mesh["tp"], {"0": KeyValueParallel(6, 3)})
    # The first step compares inputs and gradients.
    keys(torch.randn(2, 8)).sum().backward()
    with NoCopies(limit=1000):
        keys(torch.randn(2, 8)).sum().backward()


def test_shared_heads_are_not_selected_by_an_index_from_the_host() -> None:
    run_ranks(2, _run_layer_with_shared_heads)


def test_each_call_reads_as_many_values_as_the_guide_lists() -> None:
    section = (
        "\n".join(page.text for page in PAGES)
        .partition("# Calls that wait for a GPU\n")[2]
        .partition("\n#")[0]
    )
    listed: dict[str, int] = {}
    for names, reads in re.findall(r"^\| (.+?) \| (\d) ", section, flags=re.MULTILINE):
        listed |= dict.fromkeys(names.replace("`", "").split("; "), int(reads))
    assert run_ranks(2, _count_reads_of_a_step) == [listed] * 2
