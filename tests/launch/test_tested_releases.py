"""Releases of torch and of upstream libraries: untested ones give one warning."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from types import ModuleType

import matrix
import pytest
from installing import run_python
from packaging.version import Version
from torch import nn

from namedmesh.launch.tested_releases import TESTED_RELEASES, ReleaseRange, warn_if_untested
from namedmesh.tensor_parallel import plan_from_hf

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [("0.13.1", False), ("0.14.0rc7", True), ("0.19.2", True), ("0.20.0", False), ("0.20.0.dev0", False)],
)
def test_only_untested_releases_give_a_warning(
    version: str, is_tested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TESTED_RELEASES, "megatron.core", ReleaseRange("megatron-core", "0.14", "0.19"))
    fake = ModuleType("megatron.core")
    monkeypatch.setattr(fake, "__version__", version, raising=False)
    monkeypatch.setitem(sys.modules, "megatron.core", fake)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            warn_if_untested("megatron.core.utils")
    expected = []
    if not is_tested:
        expected = [
            f"namedmesh is tested with megatron-core 0.14 to 0.19, and {version} is installed; if something "
            "fails, install a tested release"
        ]
    assert [str(warning.message) for warning in caught] == expected


INIT_TWICE = """
import torch, warnings
torch.__version__ = "{version}"
import namedmesh
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        namedmesh.init_mesh(dp=-1, device="cpu").close()
for warning in caught:
    print(warning.filename, warning.message)
"""


def test_init_mesh_warns_once_about_an_old_torch() -> None:
    environment = (
        "import os\nfor name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK'):\n    os.environ.pop(name, None)\n"
    )
    printed = run_python(environment + INIT_TWICE.format(version="2.11.0+cu130"))
    assert printed == (
        f"<string> namedmesh is tested with {TESTED_RELEASES['torch']}, and 2.11.0+cu130 is installed; if "
        "something fails, install a tested release\n"
    )
    # Users of nightly builds know that they are ahead.
    assert run_python(environment + INIT_TWICE.format(version="2.16.0.dev1")) == ""


@pytest.mark.oracle("fairscale")
def test_install_warns_about_an_untested_release(monkeypatch: pytest.MonkeyPatch) -> None:
    import fairscale

    from namedmesh.compat import fairscale as layer

    monkeypatch.setattr(fairscale, "__version__", "99.0")
    try:
        with pytest.warns(UserWarning, match=r"^namedmesh is tested with fairscale .*, and 99\.0 ") as caught:
            layer.install()
    finally:
        layer.uninstall()
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.oracle("transformers")
def test_plan_from_hf_warns_about_an_untested_release(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    model = nn.Sequential(nn.Linear(4, 4))
    model._tp_plan = {"0": "colwise"}  # type: ignore[assignment]
    assert plan_from_hf(model).keys() == {"0"}
    monkeypatch.setattr(transformers, "__version__", "4.57.0")
    with pytest.warns(
        UserWarning, match=r"^namedmesh is tested with transformers .*, and 4\.57\.0 "
    ) as caught:
        plan_from_hf(model)
    assert [warning.filename for warning in caught] == [__file__]


def test_the_tested_releases_are_those_of_the_test_runs() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pinned = dict(re.findall(r'"([\w-]+)==([\d.]+)"', project))
    for module in ("megatron.core", "deepspeed", "fairscale", "transformers"):
        tested = TESTED_RELEASES[module]
        version = Version(pinned[tested.package.lower()])
        assert Version(tested.oldest) <= version
        newest = Version(tested.newest).release
        is_older = version.release[: len(newest)] < newest
        # The newest megatron-core is not installable on the oldest Python: .ci/run unpacks it.
        assert version.release[: len(newest)] == newest or (is_older and module == "megatron.core")
    oldest, *_, newest_torch = (".".join(release.split(".")[:2]) for release in matrix.RELEASES)
    assert (oldest, newest_torch) == (TESTED_RELEASES["torch"].oldest, TESTED_RELEASES["torch"].newest)
    assert f'"torch>={oldest}"' in project
