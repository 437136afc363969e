"""Plans of torch's documentation, in torch's own styles."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from tp_models import NORMS

REPLICATED, SEQUENCE = Replicate(), Shard(1)
COLUMNS = tuple(f"layers.*.{name}" for name in ("attention.wq", "attention.wk", "attention.wv"))
COLUMNS += tuple(f"layers.*.feed_forward.{name}" for name in ("w1", "w3"))
ROWS = ("layers.*.attention.wo", "layers.*.feed_forward.w2")
TORCH = (ColwiseParallel, RowwiseParallel)


def make_torchs_plan(
    columns: Any, rows: Any, between: Any, *, prepared: bool, loss: bool = False
) -> dict[str, Any]:
    """Make the plan of torch's documentation for a Llama.

    Args:
        columns: the class of the column style.
        rows: the class of the row style.
        between: the layout of the activations between blocks.
        prepared: whether ``PrepareModuleInput`` gathers the input of a block once.
        loss: whether the logits stay sharded for ``loss_parallel``.
    """
    plan: dict[str, Any] = dict.fromkeys(ROWS, rows(output_layouts=between))
    plan |= dict.fromkeys(COLUMNS, columns() if prepared else columns(input_layouts=between))
    plan["tok_embeddings"] = rows(input_layouts=REPLICATED, output_layouts=between)
    logits = Shard(-1) if loss else REPLICATED
    plan["output"] = columns(input_layouts=between, output_layouts=logits, use_local_output=not loss)
    if prepared:
        style = PrepareModuleInput(input_layouts=between, desired_input_layouts=REPLICATED)
        plan |= {"layers.*.attention": style, "layers.*.feed_forward": style}
    if between == SEQUENCE:
        plan |= dict.fromkeys(NORMS, SequenceParallel())
    return plan
