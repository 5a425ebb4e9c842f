"""Answers of pure tools, remembered for a run.

Same name and same arguments, same answer; a call that is still running is shared too. Only good
answers stay, and only so many and so much text of them that a long run does not grow by them. What
stays is the answer alone: a finished future would keep the event loops of all who waited for it.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from toolgrpo.tools.tool_reply import Reply

_Call = tuple[str, str]


@dataclass(frozen=True, slots=True)
class CacheLookup:
    """A reply to wait for, and whether somebody asked before."""

    future: Future[Reply]
    hit: bool


class ResultCache:
    """The most recently used answers; safe from any thread."""

    def __init__(self, max_entries: int = 10_000, max_chars: int = 16 * 2**20) -> None:
        self._max_entries = max_entries
        self._max_chars = max_chars
        self._lock = threading.Lock()
        self._running: dict[_Call, Future[Reply]] = {}
        self._answers: OrderedDict[_Call, Reply] = OrderedDict()
        self._chars = 0

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, name: str, arguments: Mapping[str, Any], run: Callable[[], Future[Reply]]) -> CacheLookup:
        """Return what is known for this call, or what `run` starts."""
        call = (name, json.dumps(arguments, sort_keys=True))
        with self._lock:
            known = self._answers.get(call)
            if known is not None:
                self._answers.move_to_end(call)
                answered: Future[Reply] = Future()
                answered.set_result(known)
                return CacheLookup(answered, hit=True)
            running = self._running.get(call)
            if running is not None:
                return CacheLookup(running, hit=True)
            future = self._running[call] = run()
        future.add_done_callback(lambda done: self._ended(call, done))
        return CacheLookup(future, hit=False)

    def _ended(self, call: _Call, done: Future[Reply]) -> None:
        """Keep a good answer, and drop the oldest ones beyond the bounds."""
        good = not done.cancelled() and done.exception() is None and done.result().error is None
        with self._lock:
            self._running.pop(call, None)
            if not good:
                return
            self._answers[call] = done.result()
            self._chars += _chars(call, done.result())
            while len(self._answers) > self._max_entries or self._chars > self._max_chars:
                self._chars -= _chars(*self._answers.popitem(last=False))


def _chars(call: _Call, reply: Reply) -> int:
    return sum(map(len, call)) + len(reply.text)
