"""Questions that a model behind a chat endpoint words anew (`toolgrpo init --writer`).

A wording is taken if it can be told without understanding it that it asks for the same: every value of ours stands in it,
no number does that is not in ours, and the answer does not. Every other row keeps our words.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from random import Random
from typing import Any

from toolgrpo.draw.play import Program
from toolgrpo.draw.wording import written
from toolgrpo.engines.base import SamplingOptions
from toolgrpo.rollout.chat_api import AT_ONCE, ChatAPI
from toolgrpo.rollout.scheduler import run_blocking
from toolgrpo.support.chat_endpoint import EndpointFailed

_TIMEOUT_S = 120.0  # of a request, with all its tries
_TRIES, _MOST_TOKENS = 3, 2048  # of a question; a thinking model thinks first
_OPTIONS = SamplingOptions(temperature=1.0)
_TASK = (
    "You reword requests. Say the request {manner}, as somebody would who knows nothing of programs. Every number, name, "
    "date, code and quoted text stays exactly as it is written, and steps stay in their order. Add nothing, leave nothing "
    "out, and do not answer the request. Reply with its new wording alone."
)
_MANNERS = ("in plain words", "briefly", "politely", "to a colleague", "as a question", "as part of a day's work")
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


class Writer:
    """Words questions, and counts those that it did not."""

    def __init__(self, url: str, model: str, say: Callable[[str], None] = lambda text: None) -> None:
        self._api, self._say = ChatAPI(url, model, _TIMEOUT_S, flag="--writer"), say
        self._n_asked = 0
        self._silent = 0  # requests without a reply since the last one with
        self._missed: Counter[str] = Counter()  # questions that keep our words, by the reason

    def look(self) -> str:
        """Ask once before anything is drawn; return what is said of the endpoint, or raise what is wrong."""
        return self._api.look([], _OPTIONS)

    def __call__(self, asked: Sequence[tuple[Program, str]], rng: Random) -> list[str]:
        """Return a wording of each question, or the question itself; no two are alike."""
        self._n_asked = len(asked)
        manners = [rng.choice(_MANNERS) for _ in asked]
        taken = {text for _, text in asked}
        said = []
        for new, (_, text) in zip(run_blocking(self._reworded(asked, manners)), asked, strict=True):
            if new != text and new in taken:
                self._missed["it is that of another question"] += 1
                new = text
            said.append(new)
            taken.add(new)
        return said

    def told(self) -> Iterator[str]:
        """Yield a line about what was worded."""
        why = ", ".join(f"{reason} ({n})" for reason, n in self._missed.most_common(5))
        ours = f"; {self._missed.total()} keep our words: {why}" if why else ""
        yield f"{self._n_asked - self._missed.total()} of {self._n_asked} questions are worded by {self._api.model}{ours}"

    async def _reworded(self, asked: Sequence[tuple[Program, str]], manners: Sequence[str]) -> list[str]:
        free, n_done = asyncio.Semaphore(AT_ONCE), 0

        async def one(program: Program, text: str, manner: str) -> str:
            nonlocal n_done
            async with free:
                new = await self._try(program, text, manner)
            n_done += 1
            self._say(f"{n_done} of {len(asked)} questions worded")
            return new

        await self._api.open()
        try:
            return await asyncio.gather(*(one(*each, manner) for each, manner in zip(asked, manners, strict=True)))
        finally:
            await self._api.close()

    async def _try(self, program: Program, text: str, manner: str) -> str:
        messages = [
            {"role": "system", "content": _TASK.format(manner=manner)},
            {"role": "user", "content": text},
        ]
        why = "the endpoint was given up"
        for _ in range(_TRIES if self._silent < AT_ONCE else 0):
            try:
                turn = (await self._api.say(messages, (), _MOST_TOKENS, _OPTIONS)).parsed
            except EndpointFailed as failed:
                why, self._silent = f"no reply ({failed})", self._silent + (failed.status is None)
                break
            self._silent = 0
            new = " ".join(turn.content.rpartition("</think>")[2].split())
            why = fault_of_wording(program, text, new) if turn.closed else "the reply has no end"
            if not why:
                return new
        self._missed[why] += 1
        return text


def fault_of_wording(program: Program, text: str, new: str) -> str:
    """Return what a wording of these calls lacks or has too much, beside ours; an empty text for a good one."""
    if not new or len(new) > 3 * len(text) + 200:
        return "it is empty" if not new else "it is too long"
    if _numbers(new) != _numbers(text):
        return "it has other numbers"
    leaves = [
        leaf
        for call in program
        for name, one in call.arguments.items()
        if name not in call.links
        for leaf in _leaves(one)
    ]
    if not all(_stands(leaf, new) for leaf in leaves):
        return "a value is missing"
    answer = program[-1].result.strip()
    return "it has the answer" if answer and _stands(answer, new) and not _stands(answer, text) else ""


def _stands(said: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(said)}(?!\w)", text) is not None


def _numbers(text: str) -> Counter[Decimal]:
    return Counter(Decimal(found) for found in _NUMBER.findall(_THOUSANDS.sub("", text)))


def _leaves(value: Any) -> Iterator[str]:
    """Yield the texts in a value, and yes, no and nothing as our wording has them; numbers are compared by themselves."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _leaves(one)
    elif isinstance(value, str):
        yield value
    elif value is None or isinstance(value, bool):
        yield written(value)
