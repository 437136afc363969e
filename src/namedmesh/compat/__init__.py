"""Compatibility layers for legacy APIs.

Each module or package serves one legacy API from the process groups of a :class:`namedmesh.NamedMesh`.
"""

from namedmesh.compat.errors import ContractError, ContractRuntimeError, ContractTypeError

__all__ = ["ContractError", "ContractRuntimeError", "ContractTypeError"]
