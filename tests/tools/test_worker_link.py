"""What a worker said before it was gone is known, however the connection ended: it decides what runs again."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from confined_python.processes.wire import pack
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


ODD: tuple[Any, ...] = (None, True, 0.5, "1", [], [1], {}, {"begun": 1})
NO_MESSAGES = (
    *(b"\xff" * 64, b"\0\0\0\2[]", b"\0\0\0\3{{{", pack("text"), pack([[]] * 3), b"\0\1\x86\xa0" + b"[" * 100_000),
    *(pack({name: value}) for name in ("begun", "returned", "id") for value in ODD),
    *(pack({"op": "pong", "retire": value}) for value in ODD if value is not None and not isinstance(value, str)),
)


@pytest.mark.parametrize("finished", [False, True])
def test_what_is_no_message_ends_the_connection(finished: bool) -> None:
    """The dispatcher, which is asked about such a message, never sees it; asyncio has nothing to complain about."""
    complaints: list[Any] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        for frame in NO_MESSAGES:
            link, worker, heard = await connected()
            worker.sendall(pack(BEGUN) + frame + pack(BEGUN))
            if finished:
                link.finish()
            while heard != ([BEGUN] if finished else [BEGUN, "gone"]):
                await asyncio.sleep(0.001)
            worker.close()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert complaints == []
