"""How much of the machine went to other work during a measurement: such numbers are to be read with that."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

__all__ = ["BUSY", "OtherWork"]

BUSY = 0.1  # a share from which it is said beside the numbers


class OtherWork:
    """`share` of the processors' time, after the block: what was neither idle nor of this process and its children.

    Children count when they have ended and were waited for. None where the system does not tell.
    """

    share: float | None = None

    def __enter__(self) -> OtherWork:
        self._before = _seconds()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        now = _seconds()
        if now is None or self._before is None:
            return
        whole, busy, own = (after - before for after, before in zip(now, self._before, strict=True))
        self.share = min(1.0, max(0.0, busy - own) / whole) if whole else None


def _seconds() -> tuple[float, float, float] | None:
    """Processor time since the start of the machine: all of it, what was not idle, and ours."""
    try:
        first = Path("/proc/stat").read_text().splitlines()[0].split()
    except OSError:
        return None
    user, nice, system, idle, wait, *interrupts = (int(one) / os.sysconf("SC_CLK_TCK") for one in first[1:9])
    busy = user + nice + system + sum(interrupts)
    mine = os.times()
    return busy + idle + wait, busy, mine.user + mine.system + mine.children_user + mine.children_system
