"""ezpz's helpers for cutting tensors, lengths and vocabularies."""

from namedmesh.compat.partition import *
from namedmesh.compat.partition import __all__ as __all__
