"""Python that others wrote is parsed from any thread."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor

from confined_python import parse_python


def test_python_is_parsed_by_several_threads_at_once() -> None:
    """A collector that calls Python, as profilers have it do, lets another thread in while one makes a tree."""

    def parse(depth: int) -> int:
        return parse(depth - 1) if depth else sum(len(parse_python(text).body) for _ in range(20))

    def let_others_in(*said: object) -> None:
        time.sleep(0)

    text, threshold = "def f(a, b):\n    return a * a + b * b\n" * 30, gc.get_threshold()
    gc.callbacks.append(let_others_in)
    gc.set_threshold(5)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(parse, (3, 9, 15, 30))) == [600] * 4
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(let_others_in)
