"""Errors of the compatibility layers.

Code that was written for a legacy API catches the error types that upstream raises. Each error
below has two bases: the root of namedmesh's errors, and upstream's type. Upstream checks arguments
with ``assert``. The compatibility layers raise instead, so that the checks also run under ``python
-O``.
"""

from __future__ import annotations

from namedmesh._errors import NamedMeshError


class ContractError(NamedMeshError, AssertionError):
    """A call that upstream forbids by an assertion."""


class ContractRuntimeError(NamedMeshError, RuntimeError):
    """A call for which upstream raises a RuntimeError."""


class ContractTypeError(NamedMeshError, TypeError):
    """An argument of a type that upstream does not support."""
