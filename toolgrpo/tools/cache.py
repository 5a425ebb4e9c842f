"""Answers of pure tools, remembered for a run.

Same name and same arguments, same answer; a call that is still running is shared too. Only good answers stay.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from toolgrpo.tools.reply import Reply

__all__ = ["CacheLookup", "ResultCache"]


@dataclass(frozen=True, slots=True)
class CacheLookup:
    """A reply to wait for, and whether somebody asked before."""

    future: Future[Reply]
    hit: bool


class ResultCache:
    """The most recently used answers; safe from any thread."""

    def __init__(self, max_entries: int = 10_000) -> None:
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._futures: OrderedDict[tuple[str, str], Future[Reply]] = OrderedDict()

    def get(self, name: str, arguments: Mapping[str, Any], run: Callable[[], Future[Reply]]) -> CacheLookup:
        """What is known for this call, or what `run` starts."""
        key = (name, json.dumps(arguments, sort_keys=True))
        with self._lock:
            known = self._futures.get(key)
            if known is not None:
                self._futures.move_to_end(key)
                return CacheLookup(known, hit=True)
            future = run()
            self._futures[key] = future
            while len(self._futures) > self._max_entries:
                self._futures.popitem(last=False)
        future.add_done_callback(lambda done: self._forget_if_bad(key, done))
        return CacheLookup(future, hit=False)

    def _forget_if_bad(self, key: tuple[str, str], done: Future[Reply]) -> None:
        if done.cancelled() or done.exception() is not None or done.result().error is not None:
            with self._lock:
                if self._futures.get(key) is done:
                    del self._futures[key]
