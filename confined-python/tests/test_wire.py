"""Frames between processes: whole, bounded, and never believed to be well formed where the sender is not trusted."""

from __future__ import annotations

import os
import socket
import struct

import pytest

from confined_python.processes.wire import (
    MAX_FRAME_BYTES,
    FrameReader,
    WireError,
    hang_up,
    pack,
    read_frame,
    receive,
    send,
)


def test_messages_arrive_whole_and_in_order_however_they_are_cut() -> None:
    messages = [{"a": 1}, {"text": "é" * 3000}, {}]
    reader, arrived = FrameReader(), []
    for byte in b"".join(map(pack, messages)):
        arrived += list(reader.feed(bytes([byte])))
    assert arrived == messages


def test_sockets_and_pipes_carry_the_same_frames() -> None:
    ours, theirs = socket.socketpair()
    send(ours, {"deep": [1, None, "x"]})
    assert receive(theirs) == {"deep": [1, None, "x"]}
    hang_up(ours)
    assert receive(theirs) is None
    theirs.close()
    reading, writing = os.pipe()
    os.write(writing, pack([1, 2]))
    os.close(writing)
    assert read_frame(reading) == [1, 2] and read_frame(reading) is None
    os.close(reading)


@pytest.mark.parametrize("body", [b"[1]", b"{", b"nan", b"[" * 5000])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        list(FrameReader().feed(struct.pack("!I", len(body)) + body))


def test_a_frame_that_announces_too_much_is_refused_before_it_is_read() -> None:
    head = struct.pack("!I", MAX_FRAME_BYTES + 1)
    with pytest.raises(WireError, match="over the limit"):
        list(FrameReader().feed(head))
    ours, theirs = socket.socketpair()
    ours.sendall(head)
    with pytest.raises(WireError, match="over the limit"):
        receive(theirs)
    ours.close()
    theirs.close()
