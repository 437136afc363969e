"""Compatibility layers for legacy APIs.

Each module or package implements one legacy API on the process groups of a
:class:`namedmesh.NamedMesh`.
"""

from namedmesh.compat.errors import ContractError, ContractRuntimeError, ContractTypeError

__all__ = ["ContractError", "ContractRuntimeError", "ContractTypeError"]
