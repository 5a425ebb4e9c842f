"""A trainer gives its engine and tool workers back by itself: where its construction fails, and
when nobody has it any more.

In a notebook a cell is run again: the new trainer is made while the old one still has its name, and
the old one goes when the name is bound anew. A trainer and its callbacks know each other, so it is
Python's garbage collection that finds it, in whichever thread that runs; closing waits for tool
workers, so it is done in the main thread or in one of its own.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast


class Closable(Protocol):
    def close(self) -> None: ...


Init = TypeVar("Init", bound=Callable[..., None])


def closed_if_it_fails(init: Init) -> Init:
    """Let a constructor close what it has made, before it raises."""

    @functools.wraps(init)
    def construct(trainer: Closable, *args: Any, **kwargs: Any) -> None:
        try:
            init(trainer, *args, **kwargs)
        except BaseException:
            trainer.close()
            raise

    return cast(Init, construct)


def close_when_nobody_has_it(trainer: Closable) -> None:
    """Close it now; called from `__del__`."""
    if sys.is_finalizing():
        return
    if threading.current_thread() is threading.main_thread():
        trainer.close()
    else:
        threading.Thread(target=trainer.close, name="toolgrpo-closing", daemon=True).start()
