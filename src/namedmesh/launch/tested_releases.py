"""The releases of torch and of upstream libraries with which namedmesh is tested."""

from __future__ import annotations

import sys
import warnings
from functools import cache
from typing import NamedTuple

from packaging.version import Version


class ReleaseRange(NamedTuple):
    """The tested releases of a package.

    Attributes:
        package: the name of the package, for messages.
        oldest: the oldest tested release.
        newest: the newest tested release, with all of its patch releases.
    """

    package: str
    oldest: str
    newest: str

    def __str__(self) -> str:
        if self.oldest == self.newest:
            return f"{self.package} {self.oldest}"
        return f"{self.package} {self.oldest} to {self.newest}"


TESTED_RELEASES = {
    "torch": ReleaseRange("torch", "2.12", "2.15"),
    "megatron.core": ReleaseRange("megatron-core", "0.14", "0.19"),
    "deepspeed": ReleaseRange("DeepSpeed", "0.19", "0.19"),
    "fairscale": ReleaseRange("fairscale", "0.4.13", "0.4.13"),
    "transformers": ReleaseRange("transformers", "5.24", "5.24"),
}
"""By the name of the module whose ``__version__`` is the release of the package."""


def warn_if_untested(module: str, *, accept_newer: bool = False) -> None:
    """Warn once if the release of a package that is in use is not tested.

    Nothing else depends on the release: code that needs a feature of a package looks for the
    feature itself.

    Args:
        module: a package, or a module in it. If it is not imported, there is no warning.
        accept_newer: do not warn about a release that is newer than the tested ones.
    """
    for name, tested in TESTED_RELEASES.items():
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None and f"{module}.".startswith(f"{name}."):
            _warn_once(tested, version, accept_newer)


@cache
def _warn_once(tested: ReleaseRange, version: str, accept_newer: bool) -> None:
    release = Version(version).release
    newest = Version(tested.newest).release
    is_too_old = release < Version(tested.oldest).release
    # 0.19.2 is a patch release of 0.19, so only the numbers that ``newest`` has are compared.
    is_too_new = release[: len(newest)] > newest
    if is_too_old or (is_too_new and not accept_newer):
        warnings.warn(
            f"namedmesh is tested with {tested}, and {version} is installed; if something fails, "
            "install a tested release",
            # The caller of the public function that calls warn_if_untested.
            stacklevel=4,
        )
