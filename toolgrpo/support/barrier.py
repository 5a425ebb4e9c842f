"""Wait for the slowest process of a run where no watchdog counts.

Each process plays its own episodes, with tools and rewards of its own, so one may end long after the others. The
first collective call after a rollout would wait for it inside NCCL, whose watchdog ends the run after `ddp_timeout`
(half an hour), or inside gloo, which has the same limit. So they meet before it, in a gloo group of their own: it has
its own deadline, and a process that is lost is an error at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from accelerate.utils import gather_object

from toolgrpo.errors import PeerError

_DEADLINE = timedelta(days=1)
_groups: dict[int, dist.ProcessGroup] = {}  # of each default group, by its identity; a process has one at a time


def wait_for_the_slowest() -> None:
    """Return when every process of the run has called this. Nothing happens in a run of one."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    default = id(dist.group.WORLD)
    if default not in _groups:
        _groups.clear()
        _groups[default] = dist.new_group(backend="gloo", timeout=_DEADLINE)
    try:
        dist.monitored_barrier(_groups[default], timeout=_DEADLINE)
    except RuntimeError as error:
        if "Connection closed" in str(error) or "reset by peer" in str(error):
            raise  # a process is gone; its own error is the one to read
        raise PeerError(f"the processes of this run did not meet within {_DEADLINE}: {error}") from error


@dataclass(frozen=True, slots=True)
class Processes:
    """This process among all of a run. `gather` gives the lists of all, in their order; `meet` comes before
    what is collective after a rollout.
    """

    n: int = 1
    index: int = 0
    gather: Callable[[list[Any]], list[Any]] = gather_object
    meet: Callable[[], None] = wait_for_the_slowest
