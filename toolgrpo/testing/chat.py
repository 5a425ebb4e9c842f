"""A chat format over plain bytes, for tests that want whole episodes and no tokenizer.

A token is a byte; 256 ends a turn, 257 opens one. The model calls a tool with a line `call NAME JSON`; a line that starts
with `call` and cannot be read is a malformed attempt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from toolgrpo.chat.base import ParsedTurn
from toolgrpo.trajectory import AttemptStatus, CallAttempt, Message

__all__ = ["ByteChat"]


class ByteChat:
    """A `ChatFormat`; `ByteChat.say` is the other direction, for scripts."""

    name = "bytes"
    end = 256
    start = 257
    stop_ids = (end,)

    @classmethod
    def say(cls, text: str, *, closed: bool = True) -> list[int]:
        """The ids of an assistant turn."""
        return [*text.encode(), *([cls.end] if closed else [])]

    @classmethod
    def text(cls, ids: Sequence[int]) -> str:
        """Any ids, readable: `|` ends a turn, `>` opens one."""
        return bytes({256: ord("|"), 257: ord(">")}.get(i, i) for i in ids).decode(errors="replace")

    def prompt(
        self,
        messages: Sequence[Message],
        schemas: Sequence[Mapping[str, Any]],
        *,
        enable_thinking: bool | None = None,
    ) -> list[int]:
        names = ",".join(schema["function"]["name"] for schema in schemas)
        ids = list(f"tools:{names}".encode())
        for message in messages:
            ids += [self.start, *f"{message['role']}:{message['content']}".encode(), self.end]
        return [*ids, self.start]

    def bridge(self, ids: Sequence[int], tool_messages: Sequence[Message]) -> list[int]:
        close = [] if ids[-1] == self.end else [self.end]
        for message in tool_messages:
            close += [self.start, *f"tool:{message['content']}".encode(), self.end]
        return [*close, self.start]

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        closed = bool(ids) and ids[-1] == self.end
        text = bytes(i for i in ids if i < 256).decode(errors="replace")
        calls = [line for line in text.split("\n") if line.startswith("call")]
        content = "\n".join(line for line in text.split("\n") if not line.startswith("call"))
        return ParsedTurn(content, None, tuple(_attempt(line) for line in calls), closed)


def _attempt(line: str) -> CallAttempt:
    parts = line.split(" ", 2)
    if len(parts) < 3:
        return CallAttempt(AttemptStatus.MISSING_NAME, line, detail="a call is `call NAME JSON`")
    try:
        return CallAttempt(AttemptStatus.OK, line, parts[1], json.loads(parts[2]))
    except ValueError as error:
        return CallAttempt(AttemptStatus.INVALID_JSON, line, parts[1], detail=str(error))
