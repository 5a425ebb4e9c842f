"""Checks of every engine, in the same words: impossible requests, and unbelievable answers.

A sample that passes has as many log-probabilities as ids, ids of the vocabulary, log-probabilities
of tokens that can be drawn, and ends where its finish reason says. So nothing behind an engine
needs to look again.

Log-probabilities are above `LEAST_LOGPROB`: fp32, in which tokens are drawn everywhere, has no
positive number below e**-104, so a token that is less likely than that was not drawn from the
distribution it is said to come from. vLLM writes minus infinity as -9999.

Pure functions; the cost is a few passes over the tokens inside the interpreter's own loops.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from reprlib import Repr
from typing import Any, NoReturn

from toolgrpo.engines.base import FinishReason, Sample, SampleRequest
from toolgrpo.errors import EngineError, FinalEngineError

LEAST_LOGPROB = -200.0
MOST_LOGPROB = 1e-3
"""Log-probabilities are rounded: that of a certain token may be a little over 0."""

_short = Repr()
_short.maxlevel, _short.maxlist, _short.maxtuple, _short.maxdict = 2, 4, 4, 4
_short.maxstring, _short.maxother, _short.maxlong = 120, 80, 40


class BadAnswer(Exception):
    """An answer that cannot be believed: the field, its value (shortened) and what was expected."""

    def __init__(self, field: str, value: Any, expected: str) -> None:
        super().__init__(f"{field} is {shown(value)}; expected {expected}")


def shown(value: Any) -> str:
    """Return a short form of a value for a sentence, without control characters."""
    return value.text if isinstance(value, Described) else _short.repr(value)


class Described:
    """A description that stands in a sentence as it is, where no value would."""

    def __init__(self, text: str) -> None:
        self.text = text


MISSING = Described("missing")


def check_request(request: SampleRequest, max_model_len: int) -> None:
    """Refuse a request that has nothing to continue, asks for nothing,
    or does not fit the context window.
    """
    if not request.ids:
        raise FinalEngineError("a request needs at least one token to continue; got none")
    if request.max_tokens < 1:
        raise FinalEngineError(f"a request must ask for at least one token; got max_tokens={request.max_tokens}")
    if len(request.ids) + request.max_tokens > max_model_len:
        raise FinalEngineError(
            f"a request of {len(request.ids)} tokens and max_tokens={request.max_tokens} does not fit the context "
            f"window of {max_model_len}; ask for at most {max_model_len - len(request.ids)} tokens"
        )


def check_sample(sample: Sample, vocabulary: int | None) -> None:
    """Raise EngineError for ids that no model has and log-probabilities that are no numbers.

    Our engines never give such; this is for those that others wrote, and costs a few microseconds.
    `vocabulary` is the number of ids the model has, if it is known.
    """
    ids, numbers = sample.ids, sample.logprobs
    try:
        good = min(ids, default=0) >= 0 and (vocabulary is None or max(ids, default=0) < vocabulary)
        good = good and (numbers is None or (len(numbers) == len(ids) and math.isfinite(sum(numbers))))
    except (TypeError, ValueError, OverflowError):
        good = False
    if good:
        return
    try:
        _check_ids(ids, sys.maxsize if vocabulary is None else vocabulary)
        _checked_logprobs(numbers or ())
        raise BadAnswer("logprobs", Described(f"{len(numbers or ())} numbers"), f"{len(ids)}, one for each token")
    except BadAnswer as error:
        raise EngineError(f"the engine returned a sample that cannot be trained on: {error}") from error


def checked_sample(
    ids: Sequence[Any], logprobs: Sequence[Any], finish_reason: FinishReason, request: SampleRequest, vocabulary: int
) -> Sample:
    """Return what was drawn as a `Sample`, or raise `BadAnswer`.

    `vocabulary` is the number of ids the model has.
    """
    _check_ids(ids, vocabulary)
    if len(logprobs) != len(ids):
        raise BadAnswer("token_logprobs", Described(f"{len(logprobs)} numbers"), f"{len(ids)}, one for each token")
    numbers = _checked_logprobs(logprobs)
    _check_end(ids, finish_reason, request)
    return Sample(tuple(ids), numbers, finish_reason)


def _check_ids(ids: Sequence[Any], vocabulary: int) -> None:
    if not len(ids):
        raise BadAnswer("token_ids", [], "at least one token")
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocabulary:
        return
    for place, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocabulary:
            raise BadAnswer(f"token_ids[{place}]", token, f"an id from 0 to {vocabulary - 1}")


def _checked_logprobs(logprobs: Sequence[Any]) -> tuple[float, ...]:
    types = set(map(type, logprobs))
    if types == {float}:
        numbers = tuple(logprobs)
    elif types <= {float, int}:
        numbers = tuple(_as_float(place, value) for place, value in enumerate(logprobs))
    else:
        place = next(n for n, value in enumerate(logprobs) if type(value) not in (float, int))
        _refuse_logprob(place, logprobs[place])
    if math.isfinite(sum(numbers)) and max(numbers) <= MOST_LOGPROB and min(numbers) >= LEAST_LOGPROB:
        return numbers
    for place, number in enumerate(numbers):
        if not LEAST_LOGPROB <= number <= MOST_LOGPROB:  # which not a number is not
            _refuse_logprob(place, number)
    raise AssertionError("unreachable: numbers between the bounds have a finite sum")


def _as_float(place: int, value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        _refuse_logprob(place, value)


def _refuse_logprob(place: int, value: Any) -> NoReturn:
    raise BadAnswer(f"token_logprobs[{place}]", value, f"a log-probability from {LEAST_LOGPROB:g} to 0")


def _check_end(ids: Sequence[int], finish_reason: FinishReason, request: SampleRequest) -> None:
    if len(ids) > request.max_tokens:
        raise BadAnswer("token_ids", Described(f"{len(ids)} tokens"), f"at most the {request.max_tokens} asked for")
    stopped = finish_reason is FinishReason.STOP
    drawn_before = ids[:-1] if stopped else ids
    if not set(request.stop_ids).isdisjoint(drawn_before):
        place = next(n for n, token in enumerate(drawn_before) if token in request.stop_ids)
        raise BadAnswer(
            f"token_ids[{place}]", ids[place], f"no stop token before the end of a sample that ended by {finish_reason}"
        )
    if stopped and ids[-1] not in request.stop_ids:
        raise BadAnswer(
            "the last of token_ids",
            ids[-1],
            f"one of the stop tokens {shown(request.stop_ids)}, since it ended by stop. A vLLM server adds those of the "
            f"model's generation_config.json unless it is started with `--generation-config vllm`",
        )
    if not stopped and len(ids) < request.max_tokens:
        raise BadAnswer(
            "token_ids",
            Described(f"{len(ids)} tokens"),
            f"the {request.max_tokens} asked for, since it ended by length",
        )
