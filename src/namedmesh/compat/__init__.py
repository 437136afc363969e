"""The dialects: each module answers for one legacy API from a :class:`namedmesh.NamedMesh`.

Their errors are those that code written for a legacy API already catches: a namedmesh error by its root, the original's by
type. The originals assert what their users may pass. Here the check is a ``raise``, which holds under ``python -O`` too.
"""

from namedmesh.errors import NamedMeshError


class ContractError(NamedMeshError, AssertionError):
    """A call that the legacy API forbids by an assertion."""


class ContractRuntimeError(NamedMeshError, RuntimeError):
    """A call that the legacy API refuses with a ``RuntimeError``."""


class ContractTypeError(NamedMeshError, TypeError):
    """An argument of a kind that the legacy API cannot work with."""
