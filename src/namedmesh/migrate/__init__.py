"""``namedmesh migrate``: from Megatron's and fairscale's calls to those of a mesh (the extra ``migrate``).

``table`` holds the calls, ``uses`` finds them in one file, ``program`` decides what is certain in all of
the files together and rewrites them, ``command`` is the command line.
"""

from namedmesh.migrate.table import FAIRSCALE, MEGATRON, Row, initialize

__all__ = ["FAIRSCALE", "MEGATRON", "Row", "initialize"]
