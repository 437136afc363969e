"""``namedmesh migrate``: replace calls of Megatron and fairscale by calls of a mesh.

``table`` holds the calls, and ``uses`` finds them in one file. ``program`` decides for all files
together which replacements are certain, and rewrites them. ``command`` is the command line.
"""

from namedmesh.tools.migrate.table import FAIRSCALE, MEGATRON, Row, initialize

__all__ = ["FAIRSCALE", "MEGATRON", "Row", "initialize"]
