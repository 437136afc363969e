"""How code runs: with which torch, compiled, under a dispatch mode, or in a CUDA graph."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from packaging.version import Version
from torch.utils import _python_dispatch

F = TypeVar("F", bound="Callable[..., Any]")


def constant_under_compile(function: F) -> F:
    """Decorate a function whose result is a constant for torch.compile.

    The compiler calls the function once, while it traces.

    ``torch.compiler.assume_constant_result`` sets the same attribute, but imports the compiler to
    do so.

    Args:
        function: the function. Its result may depend on its arguments only.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def disable_dispatch_modes(function: F) -> F:
    """Decorate a function to run with fake-tensor, inference and other modes disabled.

    Code that is called under such a mode, and that keeps the tensors it makes, must make real ones.

    Args:
        function: the function, which takes positional arguments only.
    """

    @wraps(function)
    def call(*args: Any) -> Any:
        run = function
        # Under a mode the compiler does not compile. Without it, it would begin here.
        if "torch._dynamo" in sys.modules and not torch.compiler.is_compiling():
            run = torch.compiler.disable(function)
        with _python_dispatch._disable_current_modes(), torch.inference_mode(False):
            return run(*args)

    return call  # type: ignore[return-value]


def is_transformed() -> bool:
    """Return whether forward-mode AD, or a transform of ``torch.func``, is active.

    Both differentiate also if gradients are disabled. torch has no public function for it.
    """
    return torch.autograd.forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def is_capturing() -> bool:
    """Return whether the current CUDA stream is being captured into a graph.

    torch's function raises if CUDA is not initialized. Here the result is False.
    """
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def torch_is_at_least(release: str) -> bool:
    """Return whether the installed torch is of a release or a newer one.

    Pre-releases count as the release: 2.15.0.dev1 is at least 2.15.

    Args:
        release: major and minor version, such as ``"2.15"``.
    """
    return _parse(torch.__version__) >= _parse(release)


# The version is parsed once. It is read at each call, as tests simulate other releases.
@cache
def _parse(version: str) -> tuple[int, ...]:
    return Version(version).release
