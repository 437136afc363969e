"""The meaning of each axis: the usual names, and their roles in a training job.

An axis may have any name. The roles below are known for the usual names only, and this is the only
module that assigns names to roles. It imports nothing.
"""

from __future__ import annotations

DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "dp", "cp", "tp")
"""The axes of everything except the experts, slowest first."""

EXPERT_AXES = ("edp", "ep", "etp")
"""The axes that only the layout of the experts has, slowest first."""

USUAL_AXES = (*DENSE_AXES, *EXPERT_AXES)
"""Every axis whose role is known."""

DATA_PARTS = ("dp_replicate", "dp_shard")
"""The two axes into which HSDP splits ``dp``: replicas, and the shards of a replica."""

DATA_AXES = ("dp", *DATA_PARTS)
"""Ranks along these axes have different samples."""

SAME_SAMPLE_AXES = ("pp", "cp", "tp")
"""Ranks along these axes have the same samples."""

SAME_TOKEN_AXES = ("pp", "tp")
"""Ranks along these axes have the same tokens, so gradients are not averaged over them."""

TOKEN_AXES = (*DATA_AXES, "cp")
"""Ranks along these axes have different tokens.

Along the data axes they have different samples, and along ``cp`` different shards of the same
sequences. The loss is a mean over these axes, and the gradients of everything except the experts
are averaged over them.
"""

FSDP_AXES = ("dp", "dp_shard", "cp")
"""FSDP2 shards parameters over these axes. Along ``dp_replicate`` shards are replicated."""

SHARDING_AXES = ("pp", "dp_shard", "tp")
"""Ranks along these axes have different shards of one replica of the parameters.

A trainer may shard parameters over other axes in addition, such as ``dp`` with ZeRO.
"""

EXPERT_MODEL_AXES = ("ep", "etp")
"""Ranks along these axes have different experts, or different shards of the same experts."""

EXPERT_SHARDING_AXES = ("pp", *EXPERT_MODEL_AXES)
"""Ranks along these axes have different shards of one replica of the experts."""

LAYER_AXES = ("tp", *EXPERT_MODEL_AXES)
"""Axes that exchange activations within every layer, and need the fastest links."""

DENSE_COUNTERPARTS = {"etp": "tp", "edp": "dp"}
"""The axes of the experts, each with the axis of the dense layout that it replaces."""

LEGACY_AXES = {"dp_replicate": "dp", "dp_shard": "dp", "sp": "cp"}
"""Axes that legacy APIs know under a coarser name, and this name. ``sp`` is DeepSpeed's."""
