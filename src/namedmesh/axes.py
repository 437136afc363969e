"""What each axis means: the names that the field uses, and the roles that they play in a training job.

An axis may have any name. The roles below are known for the usual names only, and this module is the one place that says
which name plays which role. It imports nothing.
"""

from __future__ import annotations

DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "dp", "cp", "tp")
"""The axes of everything except the experts, slowest first."""

EXPERT_AXES = ("edp", "ep", "etp")
"""The axes that only the layout of the experts has, slowest first."""

USUAL_AXES = (*DENSE_AXES, *EXPERT_AXES)
"""Every axis whose role is known."""

DATA_PARTS = ("dp_replicate", "dp_shard")
"""The two axes that ``dp`` is split into for hybrid sharding (HSDP): replicas of the model, and the shards of each."""

DATA_AXES = ("dp", *DATA_PARTS)
"""Ranks along these axes have different samples."""

SAME_SAMPLE_AXES = ("pp", "cp", "tp")
"""Ranks along these axes have the same samples."""

SAME_TOKEN_AXES = ("pp", "tp")
"""Ranks along these axes have the same tokens, so no gradients are averaged over them."""

TOKEN_AXES = (*DATA_AXES, "cp")
"""Ranks along these axes have different tokens: other samples, or along ``cp`` other parts of the same sequences. The loss is a
mean over these axes, and the gradients of everything except the experts are averaged over them."""

FSDP_AXES = ("dp", "dp_shard", "cp")
"""FSDP2 shards parameters over these axes; along ``dp_replicate`` it keeps a replica of every shard."""

SHARDING_AXES = ("pp", "dp_shard", "tp")
"""Ranks along these axes hold different parts of one copy of the parameters, whatever the trainer shards in addition."""

EXPERT_MODEL_AXES = ("ep", "etp")
"""Ranks along these axes hold different experts, or different shards of the same experts."""

EXPERT_SHARDING_AXES = ("pp", *EXPERT_MODEL_AXES)
"""Ranks along these axes hold different parts of one copy of the experts."""

LAYER_AXES = ("tp", *EXPERT_MODEL_AXES)
"""Ranks along these axes exchange activations inside every layer, so they need the fastest links."""

DENSE_COUNTERPARTS = {"etp": "tp", "edp": "dp"}
"""The experts' axes that take the place of an axis of the dense layout, and that axis."""

LEGACY_AXES = {"dp_replicate": "dp", "dp_shard": "dp", "sp": "cp"}
"""The axes that legacy APIs know under a coarser name, and that name. ``sp`` is DeepSpeed's sequence parallelism."""
