"""Decide which replacements are certain in a whole program, and make them.

``mesh.rank("dp")`` equals ``get_data_parallel_rank()`` only if the program has a mesh, and if
nothing else changes the results of the legacy API. Therefore the call that makes the groups stays,
with all of its arguments, and the compatibility layer is installed before it. The program's own
call then makes a mesh, which `namedmesh.current_mesh()` returns, and all calls that are not
replaced return the same groups.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType

from namedmesh.tools.migrate.table import APIS, Advice, LegacyApi
from namedmesh.tools.migrate.uses import FileUses, Use

_VIRTUAL_DOUBT = (
    "the program has virtual pipeline stages, which the default of ignore_virtual takes into "
    "account in megatron-core up to 0.12 and in copies of it; give ignore_virtual=True if they "
    "are to be ignored"
)
_ONE_PROCESS_DOUBT = (
    "the program makes its groups under a condition only, and before them it returns a number, "
    "in one process for example, where a mesh raises an error"
)


class Program:
    """All files of a program that name a legacy API.

    Args:
        files: the uses of legacy APIs in each file.
        accepted: the file and the line of obstacles that do not count.
        modules: the APIs of modules of the program, such as its own ``mpu``: upstream's module by
            the name of the program's.

    Attributes:
        files: the argument.
        obstacles: by legacy API, the reason why none of its uses can be replaced in this program.
        has_virtual: whether the program has virtual pipeline stages, or may have.
    """

    def __init__(
        self,
        files: Sequence[FileUses],
        accepted: Collection[tuple[Path, int]] = frozenset(),
        modules: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.files = files
        self.accepted = accepted
        self.modules = modules
        self.has_virtual: bool = any(file.has_virtual for file in files)
        self.obstacles: dict[str, str] = {}
        self._uses = list(chain.from_iterable(file.uses for file in files))
        for api in APIS:
            is_used = any(use.api == api.name for use in self._uses)
            obstacle = self._find_obstacle(api) if is_used else ""
            if obstacle:
                self.obstacles[api.name] = obstacle

    def _find_obstacle(self, api: LegacyApi) -> str:
        """Return why no use of a legacy API can be replaced in this program; empty if some can."""
        for file in self.files:
            for line, text in file.obstacles.get(api.name, {}).items():
                if (file.path.resolve(), line) not in self.accepted:
                    return f"{file.path}:{line} {text}; --accept {file.path}:{line} takes it upon yourself"
        # The groups of a legacy API are made by its own call, or by a compatibility layer.
        with_groups: set[str] = set()
        for file in self.files:
            with_groups.update(file.initialized, file.installed)
        if api.name not in with_groups:
            return (
                f"none of the files makes {api.name}'s groups; give all files of the program, "
                "the one that calls initialize_model_parallel, too"
            )
        if len(with_groups) > 1:
            return f"the program has groups of {' and '.join(sorted(with_groups))}: there is no one mesh"
        return ""

    def advise(self, use: Use) -> Advice:
        """Return the replacement of a use, with a doubt if another part of the program raises one."""
        advice = use.advice
        if use.makes_groups or advice.doubt:
            return advice
        if use.api in self.obstacles:
            return advice._replace(doubt="nothing is certain in this program")
        if advice.needs_no_virtual and self.has_virtual:
            return advice._replace(doubt=_VIRTUAL_DOUBT)
        if advice.needs_groups and not self._always_makes_groups(use.api):
            return advice._replace(doubt=_ONE_PROCESS_DOUBT)
        return advice

    def _always_makes_groups(self, api: str) -> bool:
        """Return whether every run of the program makes the groups of a legacy API."""
        for file in self.files:
            if api in file.installed:
                return True
            for function in file.always_initialized.get(api, ()):
                # A function that is only called under a condition is no initialization of every run.
                if not any(other.conditional_calls.get(function) for other in self.files):
                    return True
        return False

    def is_replaced(self, use: Use) -> bool:
        """Return whether a use is replaced when the program is rewritten."""
        return not use.makes_groups and not self.advise(use).doubt

    def list_missing_layers(self, file: FileUses) -> list[LegacyApi]:
        """Return the legacy APIs for which a rewrite adds ``install()`` to a file."""
        # A program without any replacement needs no mesh.
        if not any(self.is_replaced(use) for use in self._uses):
            return []
        names = file.initialized.keys() - file.installed - self.obstacles.keys()
        return [api for api in APIS if api.name in names]

    def format_install(self, api: LegacyApi) -> str:
        """Return the call that installs the layer of an API, for the program's own module of it."""
        own = [f'"{name}"' for name, upstream in self.modules.items() if upstream in api.modules]
        return f"{api.layer}.install({', '.join(own[:1])})"

    def rewrite(self, file: FileUses) -> bytes:
        """Return the source of a file with all certain replacements.

        Args:
            file: a file of this program, as :func:`read_file` returns it.
        """
        newline = b"\r\n" if b"\r\n" in file.source else b"\n"
        # The offsets in bytes between which the file is replaced, and the new text.
        edits: list[tuple[int, int, bytes]] = []
        imports: list[str] = []
        # The mesh of the call that made the groups is the current one, in whichever file that is.
        for use in file.uses:
            if self.is_replaced(use):
                new = re.sub(r"(?<![\w.])mesh\.", "namedmesh.current_mesh().", use.advice.new)
                edits.append((use.start, use.end, new.encode()))
        if edits and not file.has_namedmesh:
            imports.append("namedmesh")
        for api in self.list_missing_layers(file):
            imports.append(api.layer)
            for start in sorted(set(file.initialized[api.name])):
                line_start = file.source.rfind(b"\n", 0, start) + 1
                indent = file.source[line_start:start]
                edits.append((start, start, self.format_install(api).encode() + newline + indent))
        if imports:
            text = b"".join(b"import " + name.encode() + newline for name in imports)
            if file.imports_end and not file.source[: file.imports_end].endswith(b"\n"):
                text = newline + text  # the file ends with its imports, without a line end
            edits.append((file.imports_end, file.imports_end, text))
        written = file.source
        # From the end, so that earlier offsets stay valid. At one offset the last edit comes first
        # in the file: an import before a statement.
        for start, end, text in sorted(edits, key=lambda edit: edit[0], reverse=True):
            written = written[:start] + text + written[end:]
        return written
