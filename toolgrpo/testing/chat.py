"""A chat format over plain bytes, for tests that want whole episodes and no tokenizer;
and a tokenizer over bytes.

In `ByteChat`, which is its own tokenizer, a token is a byte; 256 ends a turn, 257 opens one. The
model calls a tool with a line `call NAME JSON`; a line that starts with `call` and cannot be read
is a malformed attempt.

`byte_tokenizer` makes a real Hugging Face tokenizer out of bytes and the special tokens of any
family, to test a chat template whose own tokenizer is not at hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from toolgrpo.chat.base import ParsedTurn
from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt
from toolgrpo.episode.trajectory import Message


class ByteChat:
    """A `ChatFormat`; `ByteChat.say` is the other direction, for scripts."""

    name = "bytes"
    end = 256
    start = 257
    stop_ids = (end,)
    call_text = "call NAME JSON"

    @classmethod
    def say(cls, text: str, *, closed: bool = True) -> list[int]:
        """Return the ids of an assistant turn."""
        return [*text.encode(), *([cls.end] if closed else [])]

    @classmethod
    def text(cls, ids: Sequence[int]) -> str:
        """Return any ids in readable form: `|` ends a turn, `>` opens one."""
        return bytes({256: ord("|"), 257: ord(">")}.get(i, i) for i in ids).decode(errors="replace")

    def __len__(self) -> int:
        return 258

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return self.text(ids)

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

    def bridge(
        self,
        ids: Sequence[int],
        tool_messages: Sequence[Message],
        *,
        messages: Sequence[Message] = (),
        schemas: Sequence[Mapping[str, Any]] = (),
        enable_thinking: bool | None = None,
    ) -> list[int]:
        close = [] if ids[-1] == self.end else [self.end]
        for message in tool_messages:
            close += [self.start, *f"{message['role']}:{message['content']}".encode(), self.end]
        return [*close, self.start]

    def parse(self, ids: Sequence[int], *, before: Sequence[int] = ()) -> ParsedTurn:
        closed = bool(ids) and ids[-1] == self.end
        text = bytes(i for i in ids if i < 256).decode(errors="replace")
        calls = [line for line in text.split("\n") if line.startswith("call")]
        content = "\n".join(line for line in text.split("\n") if not line.startswith("call"))
        return ParsedTurn(content, None, tuple(_attempt(line) for line in calls), closed)


def _attempt(line: str) -> CallAttempt:
    parts = line.split(" ", 2)
    if len(parts) < 3:
        return CallAttempt(AttemptStatus.MISSING_NAME, line, detail=f"a call is `{ByteChat.call_text}`")
    try:
        return CallAttempt(AttemptStatus.OK, line, parts[1], json.loads(parts[2]))
    except ValueError as error:
        return CallAttempt(AttemptStatus.INVALID_JSON, line, parts[1], detail=str(error))


def byte_tokenizer(
    template: str, tokens: Iterable[str], *, special: Iterable[str] = (), bos: str | None = None, eos: str | None = None
) -> Any:
    """Build a fast tokenizer: 256 bytes, and one id per item of `tokens` and `special`.

    Those of `special` are skipped by `skip_special_tokens`.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in tokens])
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, clean_up_tokenization_spaces=False
    )
    fast.chat_template = template
    return fast
