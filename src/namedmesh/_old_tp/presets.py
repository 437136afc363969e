"""Ready plans for models with well-known module names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.tensor import Replicate, Shard

from namedmesh.tensor_parallel.attention_heads import KeyValueParallel
from namedmesh.tensor_parallel.local import LocalParameters
from namedmesh.tensor_parallel.shared_input import SharedInput
from namedmesh.tensor_parallel.styles import ColwiseParallel, RowwiseParallel

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


def llama_plan(
    *, sequence_parallel: bool = False, loss_parallel: bool = False, sequence_dim: int = 1
) -> dict[str, ParallelStyle]:
    """Return the plan of a Llama-style decoder.

    The names are ``tok_embeddings``, ``layers.*.attention_norm``, ``layers.*.attention.{wq,wk,wv,wo}``,
    ``layers.*.ffn_norm``, ``layers.*.feed_forward.{w1,w2,w3}``, ``norm`` and ``output``. The model's
    attention works on the heads it finds, ``view(batch, sequence, -1, head_dim)``.

    The input of ``attention``, and of ``feed_forward``, is one :class:`SharedInput`: gathered once for its
    column layers where the sequence is sharded, and its gradient summed once.

    Args:
        sequence_parallel: between the sharded parts each rank keeps its shard of the sequence; the norms run
            on it, and every length must be a multiple of the tp size.
        loss_parallel: leave the logits sharded over the vocabulary, as a DTensor, for :func:`cross_entropy`
            or ``torch.distributed.tensor.parallel.loss_parallel``; otherwise every rank gets all logits.
        sequence_dim: the dim of the sequence in the activations.

    Returns:
        A dict for ``parallelize``: a fresh one, to change as needed.

    Example:
        >>> from namedmesh.tensor_parallel import llama_plan
        >>> sorted(llama_plan())[-3:]
        ['layers.*.feed_forward.w3', 'output', 'tok_embeddings']
        >>> llama_plan(sequence_parallel=True)["layers.*.feed_forward.w2"].output_layouts
        (Shard(dim=1),)
    """
    between = Shard(sequence_dim) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "output": ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
    }
    for name in ("attention", "feed_forward"):
        plan[f"layers.*.{name}"] = SharedInput(input_layouts=between)
    for name in ("attention.wq", "feed_forward.w1", "feed_forward.w3"):
        plan[f"layers.*.{name}"] = ColwiseParallel()
    for name in ("attention.wk", "attention.wv"):
        plan[f"layers.*.{name}"] = KeyValueParallel()
    for name in ("attention.wo", "feed_forward.w2"):
        plan[f"layers.*.{name}"] = RowwiseParallel(output_layouts=between)
    if sequence_parallel:
        for name in ("layers.*.attention_norm", "layers.*.ffn_norm", "norm"):
            # As torch's SequenceParallel on plain tensors, without the cost of DTensor arithmetic.
            plan[name] = LocalParameters()
    return plan
