"""Short ways to write the entries of the table."""

from __future__ import annotations

from namedmesh.migrate.once import flatten, quoted
from namedmesh.migrate.rules import Entry, Variant

__all__ = ["function", "group", "group_value", "numbers", "stays", "value", "variant"]


def variant(replacement: str, *once: str, note: str = "", **when: bool) -> Variant:
    """A replacement that goes with some flags.

    Example:
        >>> variant('mesh.size("dp", "cp")', with_context_parallel=True).when
        (('with_context_parallel', True),)
    """
    return Variant(replacement, once, note, tuple(when.items()))


def function(
    name: str, *variants: Variant | str, parameters: tuple[str, ...] = (), examples: tuple[str, ...] = ()
) -> Entry:
    """The entry of a function; the flags of its variants are its parameters unless others are given.

    Example:
        >>> function("get_tensor_model_parallel_rank", 'mesh.rank("tp")').legacy
        ('get_tensor_model_parallel_rank()',)
    """
    made = tuple(one if isinstance(one, Variant) else Variant(one) for one in variants)
    flags = dict.fromkeys(flag for one in made for flag, _ in one.when)
    return Entry(name, parameters or tuple(flags), made, examples)


def value(name: str, replacement: str, *once: str, note: str = "") -> Entry:
    """The entry of a name that is read, not called.

    Example:
        >>> value("_PIPELINE_GLOBAL_RANKS", 'list(mesh.ranks("pp"))').legacy
        ('_PIPELINE_GLOBAL_RANKS',)
    """
    return Entry(name, None, (Variant(replacement, once, note),))


def stays(name: str, note: str, *, parameters: tuple[str, ...] | None = ()) -> Entry:
    """The entry of a name that no mesh call replaces; the note says what to do instead.

    Example:
        >>> stays("set_data_parallel_rank", "make another mesh").variants[0].note
        'make another mesh'
    """
    shown = (f"{name}({', '.join(parameters)})",) if parameters else ()
    return Entry(name, parameters, (Variant("", (), note),), shown)


def group(name: str, *axes: str, once: tuple[str, ...] = ()) -> Entry:
    """The entry of ``get_<name>_group``, which is the group over some axes of the mesh or of one view.

    Example:
        >>> group("model_parallel", "pp", "tp").variants[0].once
        ('mesh.flatten("pp", "tp")',)
    """
    return function(f"get_{name}_group", _group(axes, once), parameters=("check_initialized",))


def group_value(name: str, *axes: str, once: tuple[str, ...] = ()) -> Entry:
    """The entry of a module-level name that holds the group over some axes.

    Example:
        >>> group_value("_MODEL_PARALLEL_GROUP", "pp", "tp").variants[0].replacement
        'mesh.group("pp", "tp")'
    """
    return Entry(name, None, (_group(axes, once),))


def numbers(name: str, *axes: str, once: tuple[str, ...] = ()) -> tuple[Entry, Entry]:
    """The entries of ``get_<name>_world_size`` and ``get_<name>_rank``.

    Example:
        >>> [entry.variants[0].replacement for entry in numbers("context_parallel", "cp")]
        ['mesh.size("cp")', 'mesh.rank("cp")']
    """
    return (
        function(f"get_{name}_world_size", variant(f"mesh.size({quoted(*axes)})", *once)),
        function(f"get_{name}_rank", variant(f"mesh.rank({quoted(*axes)})", *once)),
    )


def _group(axes: tuple[str, ...], once: tuple[str, ...]) -> Variant:
    needed = once + ((flatten(*axes),) if len(axes) > 1 else ())
    return variant(f"mesh.group({quoted(*axes)})", *needed)
