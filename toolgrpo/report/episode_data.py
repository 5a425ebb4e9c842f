"""What the page needs of one episode: short keys, each text once, tokens apart from texts.

The keys are read by `page/data.js`. Texts longer than `TEXT_LIMIT` are cut in the middle and say
so: the page must open, whatever a tool returned; `episodes.jsonl` has all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from toolgrpo.calls import RUNNABLE
from toolgrpo.observe.records import ids_checksum
from toolgrpo.void_turns import is_void_record

TEXT_LIMIT = 20_000  # characters

Record = Mapping[str, Any]


def cut_text(value: Any) -> str:
    """Return a value as text, cut in the middle where it is too long for a page."""
    text = value if isinstance(value, str) else "" if value is None else str(value)
    if len(text) <= TEXT_LIMIT:
        return text
    half = TEXT_LIMIT // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[... {left_out:,} characters left out here; the recording has them ...]\n{text[-half:]}"


def _bounded(value: Any, depth: int = 6) -> Any:
    """Return a JSON value with its texts cut, its lists shortened and its depth limited."""
    if isinstance(value, str):
        return cut_text(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    if depth == 0:
        return cut_text(str(value))
    if isinstance(value, Mapping):
        return {cut_text(str(key))[:200]: _bounded(inner, depth - 1) for key, inner in list(value.items())[:200]}
    if isinstance(value, Sequence):
        return [_bounded(inner, depth - 1) for inner in value[:500]]
    return cut_text(str(value))


def episode_texts(record: Record) -> dict[str, Any]:
    """Return everything of an episode but its tokens, its prompt and its row."""
    timings = record.get("timings") or {}
    turns = [_turn(turn) | _credit(record, place) for place, turn in enumerate(record.get("turns") or ())]
    return _without_none(
        {
            "n": record.get("episode"),
            "g": record.get("group"),
            "q": record.get("prompt_id"),
            "ok": record.get("success"),
            "r": record.get("reward_given"),
            "rw": record.get("rewards") or None,
            "a": record.get("advantage"),
            "stop": record.get("stop_reason"),
            "fail": record.get("failure") and cut_text(record["failure"]),
            "env": record.get("reward"),
            "w": record.get("weight_version"),
            "label": record.get("label"),
            "d": record.get("duration_s"),
            "qs": timings.get("queued_s") or None,
            "ro": timings.get("rollout_s"),
            "turns": turns,
            # without turns (an episode cut before its first) the messages are all there is
            "msgs": None if turns else _bounded(record.get("messages") or None),
            "len": len(record.get("ids") or ()),
            "gen": sum(record.get("mask") or ()),
            "seg": _segment_starts(record) or None,
        }
    )


def _segment_starts(record: Record) -> list[list[int]]:
    """Return where later segments begin: the place among the tokens, and the tokens of its prompt."""
    return [[one["start"], one["n_prompt"]] for one in record.get("segment_starts") or ()]


def _turn(turn: Record) -> dict[str, Any]:
    return _without_none(
        {
            "c": cut_text(turn.get("content")),
            "th": cut_text(turn.get("reasoning")) or None,
            "cut": None if turn.get("closed", True) else 1,
            "st": turn.get("start"),
            "en": turn.get("end"),
            "t0": round(turn.get("started_s") or 0.0, 4),
            "s": round(turn.get("duration_s") or 0.0, 4),
            "at": [_attempt(attempt) for attempt in turn.get("attempts") or ()] or None,
            "re": [_result(result) for result in turn.get("results") or ()] or None,
            "u": None if turn.get("user") is None else cut_text(turn["user"]),
            "w": _weights(turn.get("weights")),
            "tk": turn.get("taken_over"),
        }
    )


def _weights(steps: Any) -> list[int] | None:
    """Return the steps whose weights drew the first and the last token of a turn, if it says so."""
    return steps if isinstance(steps, list) and len(steps) == 2 else None


def _credit(record: Record, turn: int) -> dict[str, Any]:
    """Return what a turn was worth by itself, and its advantage, where turns have their own."""

    def of_turn(name: str) -> float | None:
        values = record.get(name) or ()
        value = values[turn] if turn < len(values) else None
        return None if value is None else float(f"{value:.6g}")

    return _without_none({"tr": of_turn("turn_rewards"), "ta": of_turn("turn_advantages")})


def _attempt(attempt: Record) -> dict[str, Any]:
    ok = attempt.get("status") == "ok"
    return _without_none(
        {
            "st": None if ok else attempt.get("status"),
            "raw": None if ok else cut_text(attempt.get("raw")),
            "n": attempt.get("name"),
            "a": _bounded(attempt.get("arguments")),
            "d": cut_text(attempt.get("detail")) or None,
        }
    )


def _result(result: Record) -> dict[str, Any]:
    return _without_none(
        {
            "c": cut_text(result.get("content")),
            "n": result.get("name"),
            "e": result.get("error"),
            "t0": round(result.get("started_s") or 0.0, 4),
            "s": round(result.get("duration_s") or 0.0, 4),
            "lo": result.get("left_out") or None,
            "ca": 1 if result.get("cached") else None,
            "end": 1 if result.get("ends_episode") else None,
        }
    )


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def bounded_prompt(record: Record) -> dict[str, Any]:
    """Return what was asked, and the row's own columns."""
    return {"m": _bounded(record.get("prompt") or []), "row": _bounded(record.get("row") or {})}


def episode_tokens(record: Record, seen: Record | None) -> dict[str, Any]:
    """Return the tokens of an episode: ids, the mask in runs, log-probabilities in thousandths.

    `seen` is what training saw of them; it is left out if it is about other tokens.
    """
    ids, mask, logprobs = (list(record.get(name) or ()) for name in ("ids", "mask", "logprobs"))
    found: dict[str, Any] = {
        "i": ids,
        "m": list(_runs(mask)),
        "l": [None if lp is None else round(lp * 1000) for lp, m in zip(logprobs, mask, strict=False) if m],
    }
    if seen is not None and seen.get("ids_crc32") == ids_checksum(ids):
        found |= _seen(seen, mask, logprobs)
    return found


def _seen(seen: Record, mask: Sequence[int], logprobs: Sequence[float | None]) -> dict[str, Any]:
    def sampled(name: str) -> list[float | None] | None:
        values = seen.get(name)
        return None if values is None else [value for value, m in zip(values, mask, strict=False) if m]

    trainer = sampled("trainer_logprobs")
    engine = [lp for lp, m in zip(logprobs, mask, strict=False) if m]
    difference = None
    if trainer is not None:
        difference = [
            None if a is None or b is None else float(f"{a - b:.3g}") for a, b in zip(trainer, engine, strict=False)
        ]
    entropy = sampled("entropy")
    return _without_none(
        {
            "d": difference,
            "h": None if entropy is None else [None if h is None else round(h, 3) for h in entropy],
            "k": sampled("correction"),
            "ta": sampled("advantage"),
        }
    )


def _runs(mask: Sequence[int]) -> Iterator[int]:
    """Yield the lengths of equal stretches; the first one is of zeros, and may be empty."""
    value, length = 0, 0
    for m in mask:
        if bool(m) == bool(value):
            length += 1
        else:
            yield length
            value, length = 1 - value, 1
    yield length


REPEATED, VOID, NO_CALL, CUT = 1, 2, 4, 8


def flags_of(record: Record) -> int:
    """Return what the ready filters ask: a sum of REPEATED, VOID, NO_CALL and CUT."""
    flags = 0
    seen: set[str] = set()
    n_calls = 0
    for turn in record.get("turns") or ():
        attempts = turn.get("attempts") or ()
        for attempt in attempts:
            n_calls += 1
            key = f"{attempt.get('name')} {attempt.get('arguments')!r}" if attempt.get("status") in RUNNABLE else None
            if key is not None and key in seen:
                flags |= REPEATED
            if key is not None:
                seen.add(key)
        if is_void_record(turn):
            flags |= VOID
    if n_calls == 0:
        flags |= NO_CALL
    if record.get("stop_reason") in ("length", "context_full", "max_turns", "max_user_turns", "deadline"):
        flags |= CUT
    return flags
