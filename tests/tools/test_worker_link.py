"""What a worker said before it was gone is known, however the connection ended: it decides what runs again."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from toolgrpo.processes.wire import pack
from toolgrpo.tools.workers.connections import WorkerLink

BEGUN = {"begun": 1}


async def connected() -> tuple[WorkerLink, socket.socket, list[Any]]:
    """A link, the worker's end, and what the link reports, with "gone" at the end of the connection."""
    ours, theirs = socket.socketpair()
    heard: list[Any] = []
    link = WorkerLink(ours, heard.append, lambda: heard.append("gone"))
    await asyncio.get_running_loop().create_connection(lambda: link, sock=ours)
    return link, theirs, heard


def test_finish_reads_what_is_there_and_lets_no_more_be_said() -> None:
    async def run() -> None:
        link, worker, heard = await connected()
        worker.sendall(pack(BEGUN))
        link.finish()
        assert heard == [BEGUN]
        with pytest.raises(OSError):
            worker.sendall(pack(BEGUN))
        await asyncio.sleep(0)
        assert heard == [BEGUN]
        worker.close()

    asyncio.run(run())


@pytest.mark.parametrize("finished", [False, True])
def test_a_write_that_fails_loses_nothing_that_had_come(finished: bool) -> None:
    async def run() -> None:
        link, worker, heard = await connected()
        worker.sendall(pack(BEGUN))
        worker.close()
        link.send({"op": "ping"})  # before the loop could read: the transport gives the connection up
        if finished:
            link.finish()
            assert heard == [BEGUN]
        for _ in range(3):
            await asyncio.sleep(0)
        assert heard == ([BEGUN] if finished else [BEGUN, "gone"])

    asyncio.run(run())


def test_what_is_no_message_ends_the_connection() -> None:
    async def run() -> None:
        _, worker, heard = await connected()
        worker.sendall(b"\xff" * 64)
        while heard != ["gone"]:
            await asyncio.sleep(0.01)
        worker.close()

    asyncio.run(asyncio.wait_for(run(), 60))
