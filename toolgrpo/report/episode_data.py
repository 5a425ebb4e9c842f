"""Convert an episode for the page: short keys, each text once, tokens apart from texts.

The keys are read by `page/data.js`. Texts longer than `TEXT_LIMIT` are cut in the middle and say
so: the page must open, whatever a tool returned; `episodes.jsonl` has all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress, groupby
from typing import Any

from toolgrpo.episode.tool_calls import RUNNABLE
from toolgrpo.episode.trajectory import copies_result, is_void_record
from toolgrpo.observe.records import ids_checksum, is_counted, shown_prompt

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
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**53 else str(value)  # a browser's numbers go no further
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
    turns = [_turn(turn) | _credit(record, place) for place, turn in enumerate(record["turns"])]
    return _without_none(
        {
            "n": record.get("episode"),
            "g": record.get("group"),
            "q": record.get("prompt_id"),
            "ok": record.get("success"),
            "r": record.get("reward_given"),
            "rw": record.get("rewards") or None,
            "a": record.get("advantage"),
            "stop": record["stop_reason"],
            "fail": record.get("failure") and cut_text(record["failure"]),
            "drop": cut_text(f"{drop['cause']}: {drop['reason']}") if (drop := record.get("drop")) else None,
            "env": record.get("reward"),
            "w": record.get("weight_version"),
            "label": record.get("label"),
            "d": record.get("duration_s"),
            "qs": timings.get("queued_s") or None,
            "turns": turns,
            # without turns (an episode cut before its first) the messages are all there is
            "msgs": None if turns else _bounded(record.get("messages") or None),
            "len": len(record["ids"]),
            "gen": sum(record["mask"]),
            # where later segments begin: the place among the tokens, and the tokens of the prompt
            "seg": [[one["start"], one["n_prompt"]] for one in record.get("segment_starts") or ()] or None,
        }
    )


def _turn(turn: Record) -> dict[str, Any]:
    weights = turn.get("weights")
    return _without_none(
        {
            "c": cut_text(turn.get("content")),
            "th": cut_text(turn.get("reasoning")) or None,
            "cut": None if turn.get("closed", True) else 1,
            "st": turn["start"],
            "en": turn["end"],
            **_times(turn),
            "at": [_attempt(attempt) for attempt in turn["attempts"]] or None,
            "re": [_result(result) for result in turn["results"]] or None,
            "u": None if turn.get("user") is None else cut_text(turn["user"]),
            "w": weights if weights is not None and len(weights) == 2 else None,
        }
    )


def _times(timed: Record) -> dict[str, float]:
    return {"t0": round(timed.get("started_s") or 0.0, 4), "s": round(timed.get("duration_s") or 0.0, 4)}


def _credit(record: Record, turn: int) -> dict[str, Any]:
    """Return the turn's own reward and advantage, if turns have them."""

    def of_turn(name: str) -> float | None:
        values = record.get(name) or ()
        value = values[turn] if turn < len(values) else None
        return None if value is None else float(f"{value:.6g}")

    return _without_none({"tr": of_turn("turn_rewards"), "ta": of_turn("turn_advantages")})


def _attempt(attempt: Record) -> dict[str, Any]:
    ok = attempt["status"] == "ok"
    return _without_none(
        {
            **({} if ok else {"st": attempt["status"], "raw": cut_text(attempt.get("raw"))}),
            "n": attempt.get("name"),
            "a": _bounded(attempt.get("arguments")),
            "d": cut_text(attempt.get("detail")) or None,
        }
    )


def _result(result: Record) -> dict[str, Any]:
    return _without_none(
        {
            "c": cut_text(result["content"]),
            "n": result.get("name"),
            "e": result["error"],
            **_times(result),
            "lo": result.get("left_out") or None,
            "ca": 1 if result.get("cached") else None,
            "end": 1 if result.get("ends_episode") else None,
        }
    )


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def bounded_prompt(record: Record) -> dict[str, Any]:
    """Return the prompt as it was shown, and the other columns of the row."""
    return {"m": _bounded(shown_prompt(record)), "row": _bounded(record["row"])}


def episode_tokens(record: Record, seen: Record | None) -> dict[str, Any]:
    """Return the tokens of an episode: ids, the mask in runs, log-probabilities in thousandths.

    `seen` is what training saw of them; it is left out if it is about other tokens.
    """
    if is_counted(record):
        return {"i": [], "m": [0], "l": []}
    ids, mask, logprobs = record["ids"], record["mask"], record["logprobs"]
    engine = list(compress(logprobs, mask))
    found: dict[str, Any] = {
        "i": ids,
        "m": _runs(mask),
        "l": [None if logprob is None else round(logprob * 1000) for logprob in engine],
    }
    if seen is None or seen.get("ids_crc32") != ids_checksum(ids):
        return found
    trainer, entropy, correction, advantage = (
        None if seen.get(name) is None else list(compress(seen[name], mask))
        for name in ("trainer_logprobs", "entropy", "correction", "advantage")
    )
    if trainer is not None:
        pairs = zip(trainer, engine, strict=False)
        found["d"] = [None if a is None or b is None else float(f"{a - b:.3g}") for a, b in pairs]
    if entropy is not None:
        found["h"] = [None if one is None else round(one, 3) for one in entropy]
    return found | _without_none({"k": correction, "ta": advantage})


def _runs(mask: Sequence[int]) -> list[int]:
    """Return the lengths of equal stretches; the first one is of zeros, and may be empty."""
    lengths = [len(list(stretch)) for _, stretch in groupby(mask)]
    return [0, *lengths] if mask and mask[0] else lengths or [0]


REPEATED, VOID, NO_CALL, CUT, COPIED, DROPPED = 1, 2, 4, 8, 16, 32
_CUT_BY = ("length", "context_full", "max_turns", "max_user_turns", "deadline")


def flags_of(record: Record) -> int:
    """Return the flags of the page's ready-made filters: a sum of those above."""
    attempts = [attempt for turn in record["turns"] for attempt in turn["attempts"]]
    calls = [f"{one.get('name')} {one.get('arguments')!r}" for one in attempts if one["status"] in RUNNABLE]
    return (
        REPEATED * (len(set(calls)) < len(calls))
        + VOID * any(map(is_void_record, record["turns"]))
        + NO_CALL * (not attempts)
        + CUT * (record["stop_reason"] in _CUT_BY)
        + COPIED * copies_result(record.get("messages") or ())
        + DROPPED * ("drop" in record)
    )
