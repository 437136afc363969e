"""What differs on CUDA and can be set on a CPU.

``as_on_cuda`` is in ``conftest.py``: a test with this fixture runs with all of it. Forked ranks inherit it.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self


class NoReads(TorchDispatchMode):
    """Count reads of values by the host, which wait for a device; more of them than the limit fail.

    A CUDA graph cannot contain one.
    """

    def __init__(self, limit: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit = limit
        self.reads = 0

    def __enter__(self) -> Self:
        tolist = Tensor.tolist

        def counted(tensor: Tensor) -> Any:
            self.read()
            return tolist(tensor)

        # On the CPU it reads the memory, and no operator runs.
        self.patch = mock.patch.object(Tensor, "tolist", counted)
        self.patch.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self.patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        if func is torch.ops.aten._local_scalar_dense.default:
            self.read()
        return func(*args, **(kwargs or {}))

    def read(self) -> None:
        """Count one read."""
        self.reads += 1
        assert self.reads <= self.limit, "the host reads a value of the device"


class DefaultDevice(TorchFunctionMode):
    """Make tensors of the package without a ``device=`` on another device, as ``torch.set_default_device`` does.

    Those of tests and of torch stay on the CPU, which cannot compute on another device.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _device_constructors() and kwargs.get("device") is None:
            module = sys._getframe(1).f_globals.get("__name__", "")
            if module.partition(".")[0] == "namedmesh":
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


@contextmanager
def optimizers_with_foreach() -> Iterator[None]:
    """Let torch's optimizers use foreach by default."""
    devices = [*_get_foreach_kernels_supported_devices(), "cpu"]
    # torch 2.12 hides the module torch.optim.optimizer behind the name of a class.
    optimizer = importlib.import_module("torch.optim.optimizer")
    with mock.patch.object(optimizer, "_get_foreach_kernels_supported_devices", return_value=devices):
        yield


@contextmanager
def backward_in_a_thread() -> Iterator[None]:
    """Run every backward in one other thread, as autograd runs what is on a GPU.

    DTensor's caches, and whatever else a thread has of its own, are others there.
    """
    backward: Callable[..., None] = torch.autograd.backward
    threads: dict[int, ThreadPoolExecutor] = {}

    def in_the_thread(*args: Any, **kwargs: Any) -> None:
        if threading.current_thread().name.startswith("autograd"):
            backward(*args, **kwargs)  # a backward in a backward
            return
        process = os.getpid()  # a forked one has no threads of its parent
        if process not in threads:
            threads[process] = ThreadPoolExecutor(1, "autograd")
        threads[process].submit(backward, *args, **kwargs).result()

    with mock.patch("torch.autograd.backward", in_the_thread):
        yield


@contextmanager
def as_cuda() -> Iterator[None]:
    """All of it, but for reads of values: some are allowed on compared steps."""
    with optimizers_with_foreach(), backward_in_a_thread(), DefaultDevice():
        yield
