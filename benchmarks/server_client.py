"""What a request to a vLLM server costs the process that sends it, which is the one that trains.

    python benchmarks/server_client.py           # half a minute
    python benchmarks/server_client.py --quick

A turn of 400 tokens is sent and one of 30 comes back, 16, 64 and 256 at a time, to a stand-in in another process that answers
at once. What counts is the processor time of this process for a request, body and answer in JSON included: by
`toolgrpo.engines.vllm_http`, and by an httpx client with the same limits. Both send all requests of a round in turn; the
median of the rounds counts.

Prints a table and writes benchmarks/results/server_client.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from _reporting import benchmark, parser_of, save
from _rows import Figure, Row

AT_ONCE = (16, 64, 256)
PROMPT, TURN = 400, 30
HEADERS = {"X-Request-Id": "1"}
SERVER = """
import sys
from http.server import ThreadingHTTPServer
from toolgrpo.testing.vllm_stand_in import StandInVLLM
ThreadingHTTPServer.request_queue_size = 1024
with StandInVLLM(draw=lambda body: [7] * (int(sys.argv[1]) - 1) + body["stop_token_ids"], max_model_len=2048) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""
Send = Callable[[dict[str, Any]], Awaitable[bytes]]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    quick = options.quick
    rounds, requests = (2, 256) if quick else (5, 1024)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(TURN)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    try:
        url = server.stdout.readline().strip() + "/v1/completions"
        results: dict[str, Any] = {}
        for at_once in AT_ONCE[:2] if quick else AT_ONCE:
            results[str(at_once)] = asyncio.run(_both(url, at_once, rounds, requests))
            save("server_client", results, quick=quick)
        return results
    finally:
        server.kill()
        server.wait()


async def _both(url: str, at_once: int, rounds: int, requests: int) -> dict[str, list[float]]:
    """Milliseconds of this process a request, by round."""
    import httpx

    from toolgrpo.engines.vllm_http import exchange, new_client

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=4.0)
    times: dict[str, list[float]] = {"ours": [], "httpx": []}
    async with new_client(keepalive_s=4.0) as own, httpx.AsyncClient(limits=limits, trust_env=False) as other:

        async def by_own(body: dict[str, Any]) -> bytes:
            return (await exchange(own, "POST", url, most_bytes=1 << 20, json=body, headers=HEADERS)).body

        async def by_httpx(body: dict[str, Any]) -> bytes:
            return (await other.post(url, json=body, headers=HEADERS)).content

        for _ in range(rounds + 1):  # the first makes the connections
            for name, send in (("ours", by_own), ("httpx", by_httpx)):
                times[name].append(await _milliseconds(send, at_once, requests))
    return {name: of[1:] for name, of in times.items()}


async def _milliseconds(send: Send, at_once: int, requests: int) -> float:
    open_ = asyncio.Semaphore(at_once)
    body = {"model": "base", "prompt": [5] * PROMPT, "max_tokens": 64, "stop_token_ids": [3]}

    async def one() -> None:
        async with open_:
            answer = json.loads(await send(body))
            assert len(answer["choices"][0]["token_ids"]) == TURN

    before = time.process_time()
    await asyncio.gather(*(one() for _ in range(requests)))
    return 1000 * (time.process_time() - before) / requests


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements."""
    what = "processor time of the sender for a turn of a vLLM server"
    return [
        Row(f"{what}, {n} at once", Figure.of(found["ours"]), "ms", Figure.of(found["httpx"]), "an httpx client")
        for n, found in results.items()
        if n.isdigit()
    ]


if __name__ == "__main__":
    benchmark(
        "server_client", parser_of(__doc__, "two rounds of a quarter of the requests, up to 64 at once"), measure, rows
    )
