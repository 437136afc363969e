"""Jobs as torchrun's agent starts them, and restarts them once; with forked workers."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

if TYPE_CHECKING:
    from collections.abc import Callable


def run_agent(worker: Callable[[], float], **config: Any) -> dict[int, float]:
    """Return the results of the workers of this agent, by rank."""
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC_", "MASTER_"))]:
        del os.environ[name]
    settings = LaunchConfig(max_restarts=1, monitor_interval=0.1, start_method="fork", **config)
    results: dict[int, float] = elastic_launch(settings, worker)()
    return results


def end_at_first(variable: str) -> None:
    """End the worker of which a variable is 1 before the others meet it, unless the job was restarted."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in a process of its own, not the agent's handler
    if (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ[variable]) == ("0", "1"):
        sys.exit(3)
