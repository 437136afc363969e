"""Errors that code written for a legacy API already catches: a namedmesh error by its root, the original's by type.

The originals assert what their users may pass, so their callers catch ``AssertionError``. Here the check is an
ordinary ``raise`` (it holds under ``python -O`` too) of an error that is both.
"""

from __future__ import annotations

from namedmesh.errors import NamedMeshError

__all__ = [
    "ContractAttributeError",
    "ContractError",
    "ContractFileNotFoundError",
    "ContractIndexError",
    "ContractKeyError",
    "ContractRuntimeError",
    "ContractTypeError",
]


class ContractError(NamedMeshError, AssertionError):
    """A call that the legacy API forbids by an assertion.

    Example:
        >>> try:
        ...     raise ContractError("got 3; only even numbers are allowed; pass 2 or 4")
        ... except AssertionError as error:
        ...     print(error)
        got 3; only even numbers are allowed; pass 2 or 4
    """


class ContractRuntimeError(NamedMeshError, RuntimeError):
    """A call that the legacy API refuses with a ``RuntimeError``."""


class ContractKeyError(NamedMeshError, KeyError):
    """A name that the legacy API looks up and does not find."""


class ContractFileNotFoundError(NamedMeshError, FileNotFoundError):
    """A file that the legacy API opens and does not find."""


class ContractAttributeError(NamedMeshError, AttributeError):
    """A name that the legacy API looks up on an object that does not have it."""


class ContractIndexError(NamedMeshError, IndexError):
    """A sequence that is shorter than the legacy API takes for granted."""


class ContractTypeError(NamedMeshError, TypeError):
    """An argument of a kind that the legacy API cannot work with."""
