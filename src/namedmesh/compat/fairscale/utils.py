"""fairscale's helpers for cutting tensors, lengths and vocabularies."""

from namedmesh.compat.partition import *  # noqa: F403  all of them
