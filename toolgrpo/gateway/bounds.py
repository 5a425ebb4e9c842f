"""The size of what a request may hold, and the threads on which it is read.

Bytes, commas and brackets are counted before anything is parsed; together they bound every step after it. Commas and
brackets count inside texts too, for a text may hold JSON (the arguments of a call) that is parsed as well. Both bounds
grow with the context window and are several times what a prompt can hold that fits into it.

Parsing, rendering and tokenizing hold up no event loop: they run on threads of their own. A thread keeps the others
waiting only for as long as one call into C lasts, and the bounds keep each such call short.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

from toolgrpo.gateway.openai_forms import Refused
from toolgrpo.tools.bounds import read_json

_BYTES_A_TOKEN = 16  # of JSON; English has 5, Chinese written as \\uXXXX 9
_LEAST_BYTES = 256 * 1024
_MOST_BYTES = 4 * 1024 * 1024
_LEAST_MARKS = 65_536
_HALF_A_CHARACTER = re.compile(r"\\ud[89a-f]", re.IGNORECASE)  # or one of a pair, which is looked into

# more would make the loop wait longer for the interpreter
_threads = ThreadPoolExecutor(2, thread_name_prefix="toolgrpo-gateway-reader")
P = ParamSpec("P")
T = TypeVar("T")


async def off_loop(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that may take long on another thread; the loop goes on."""
    return await asyncio.get_running_loop().run_in_executor(_threads, partial(function, *args, **kwargs))


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a request's body, for a model of this context window."""

    window: int

    @property
    def n_bytes(self) -> int:
        return min(max(_LEAST_BYTES, _BYTES_A_TOKEN * self.window), _MOST_BYTES)

    def check_bytes(self, n_bytes: int) -> None:
        """Refuse a body of so many bytes, known or counted, if they are too many."""
        if n_bytes > self.n_bytes:
            raise self._too_large(f"is larger than {self.n_bytes} bytes")

    def read(self, body: bytes | bytearray) -> Any:
        """Return the JSON of a body; half a character in it is replaced."""
        most = _LEAST_MARKS + self.window
        if sum(map(body.count, (b",", b"[", b"{"))) > most:
            raise self._too_large(f"has more than {most} commas and brackets")
        try:
            text = body.decode("utf-8-sig")
            if _HALF_A_CHARACTER.search(text):
                text = json.dumps(json.loads(text), ensure_ascii=False).encode(errors="replace").decode()
            return read_json(text)
        except (ValueError, RecursionError) as error:
            raise Refused(400, "invalid_value", f"the body is not JSON: {error}") from error

    def _too_large(self, what: str) -> Refused:
        window = f"this model's context window is {self.window} tokens"
        return Refused(413, "context_length_exceeded", f"{window}, and the body {what}; send less")
