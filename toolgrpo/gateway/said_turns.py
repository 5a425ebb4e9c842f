"""Sampled turns as text: where a stop text ends them, and what a client repeats of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from toolgrpo.engines.base import FinishReason, Sample
from toolgrpo.gateway.openai_forms import Said, read_arguments
from toolgrpo.rollout.truncation import TextTokenizer
from toolgrpo.trajectory import Message


def stopped_at(sample: Sample, stop: Sequence[str], tokenizer: TextTokenizer) -> tuple[Sample, bool]:
    """Return the sample up to and with the token that completes one of these texts, and whether one does.

    An engine that knew the texts would have stopped there. The end-of-turn token is gone then: the
    bridge that follows makes one up.
    """

    def holds_one(n_tokens: int) -> bool:
        shown = tokenizer.decode(list(sample.ids[:n_tokens]))
        return any(text in shown for text in stop)

    if not stop or not holds_one(len(sample.ids)):
        return sample, False
    low, high = 1, len(sample.ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds_one(middle) else (middle + 1, high)
    if low == len(sample.ids):
        return sample, True
    logprobs = None if sample.logprobs is None else sample.logprobs[:low]
    return replace(sample, ids=sample.ids[:low], logprobs=logprobs, finish_reason=FinishReason.LENGTH), True


def text_of(sample: Sample, tokenizer: TextTokenizer, stop_ids: Sequence[int]) -> str:
    """Return a turn's text, without the token that ends it."""
    ends = bool(sample.ids) and sample.ids[-1] in stop_ids
    return tokenizer.decode(list(sample.ids[:-1] if ends else sample.ids))


def text_before(text: str, stop: Sequence[str]) -> str:
    """Return a text up to the first of these."""
    places = [place for place in map(text.find, stop) if place >= 0]
    return text[: min(places)] if places else text


def as_repeated(said: Said) -> Message:
    """Return an answer as a client will repeat it."""
    message: Message = {"role": "assistant", "content": said.content}
    if said.calls:
        message["tool_calls"] = [
            {"function": {"name": call.name, "arguments": read_arguments(call.arguments)}} for call in said.calls
        ]
    return message
