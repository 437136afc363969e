"""Errors of the dialects."""

from namedmesh.compat import ContractAttributeError, ContractError, ContractRuntimeError, ContractTypeError

__all__ = ["ContractAttributeError", "ContractError", "ContractRuntimeError", "ContractTypeError"]
