"""A recorded run without a model: every kind of episode, made by hand and written by the recorder.

`record_run` is what tests of readers look at. Its tokens are bytes, and one special token.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.segments import cut_into_segments
from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt, ToolErrorKind, ToolResult
from toolgrpo.episode.trajectory import StopReason, Trajectory, Turn
from toolgrpo.observe.recorder import EpisodeRecorder, episodes_path
from toolgrpo.rollout.batch import Grade, Mode, RolloutBatch, RolloutTimes, Scored
from toolgrpo.rollout.observers import RolloutBegan

Said = Callable[[str], str]
_END = 256  # the special token
KINDS = ("solved", "guessed", "repeats", "cut")
_REWARDS = {"solved": (1.0, 1.0), "guessed": (0.0, 0.0), "repeats": (1.0, 0.2), "cut": (0.0, 0.0)}


def record_run(
    folder: Path, *, steps: int = 3, groups: int = 2, heldout: int = 2, said: Said = lambda text: text
) -> Path:
    """Record a run of groups of four, one of each of `KINDS` (the second of the first step is dead); return its folder.

    `said` changes every text that a model, a tool or a row wrote.
    """
    recorder = EpisodeRecorder(episodes_path(folder, 0), token_text=lambda number: _token_text(number, said))
    lines: list[dict[str, Any]] = []
    for label, kind in (("before (greedy)", "guessed"), ("after (greedy)", "solved")):
        batch = _batch([kind] * heldout, 0 if "before" in label else steps, "heldout", 1, 0, said)
        recorder.rollout_began(RolloutBegan(len(batch), batch.step, "heldout", said(label)))
        recorder.batch_done(batch)
        measured = {"n": len(batch), "successes": sum(batch.successes), "reward": 0.5}
        lines.append({"kind": "measured", "step": batch.step, "label": said(label), **measured})
    for step in range(steps):
        dead = ("guessed",) * 4
        kinds = [kind for group in range(groups) for kind in (dead if (step, group) == (0, 1) else KINDS)]
        batch = _batch(kinds, step, "train", 4, step * len(kinds), said)
        recorder.batch_done(batch)
        _see_tokens(recorder, batch)
        lines.append(_step_line(batch, said))
    recorder.close()
    config = {said("learning_rate"): said("high")}
    first = {"kind": "run", "schema": 2, "model": said("tiny"), "tools": [said("add")], "max_steps": steps}
    event = {"kind": "event", "step": 1, "what": "warning", "text": said("the tools are slow")}
    whole = [{**first, "resumed": None, "config": config, "versions": {"toolgrpo": "0"}}, *lines, event]
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in whole), encoding="utf-8")
    return folder


def _batch(kinds: list[str], step: int, mode: Mode, size: int, first: int, said: Said) -> RolloutBatch:
    episodes = []
    for place, kind in enumerate(kinds):
        question = place // size
        asked = {"system": "Use the tool.", "user": f"What is {question} plus 2?"}
        prompt = [{"role": role, "content": said(text)} for role, text in asked.items()]
        row = {"prompt": prompt, "answer": said(str(question + 2)), said("source"): said("by hand")}
        episodes.append(Scored(row, _trajectory(kind, question, place, said)))
    times = RolloutTimes(3.0, 0.5, 99.0)
    batch = RolloutBatch(episodes=tuple(episodes), step=step, mode=mode, times=times, group_size=size)
    given = [_REWARDS[kind] for kind in kinds]
    grades = [Grade({said("right"): right, said("form"): form}, (right + form) / 2) for right, form in given]
    graded = batch.graded(grades, lambda one: one.total == 1.0)
    if mode == "heldout":
        return graded
    totals = [one.total or 0.0 for one in graded.episodes]
    means = [sum(totals[place // size * size :][:size]) / size for place in range(len(kinds))]
    of_turns = [(0.5, -0.25, 0.75) if kind == "repeats" else None for kind in kinds]
    advantages = [total - mean for total, mean in zip(totals, means, strict=True)]
    return graded.numbered(first).with_advantages(advantages, of_turns)


def _trajectory(kind: str, question: int, place: int, said: Said) -> Trajectory:
    call = CallAttempt(AttemptStatus.OK, said('{"name": "add"}'), said("add"), {said("a"): question, "b": said("2")})
    result = ToolResult(said(str(question + 2)), said("add"), started_s=0.5, duration_s=0.2)
    failed = replace(result, content=said("Error: no"), error=ToolErrorKind.RAISED, left_out=7)
    unclosed = CallAttempt(AttemptStatus.UNCLOSED, said('{"name": "add", '), detail=said("the call is not closed"))
    answer = (said(f"The answer is {question + 2}."), said("done"), (), ())
    spoken: dict[str, list[tuple[str, str | None, tuple[CallAttempt, ...], tuple[ToolResult, ...]]]] = {
        "solved": [("", said("I add."), (call,), (result,)), answer],
        "guessed": [(said("The answer is 9."), None, (), ())],
        "repeats": [("", None, (call,), (failed,)), ("", None, (call,), (replace(result, cached=True),)), answer],
        "cut": [("", None, (), ()), (said("I think"), None, (unclosed,), ())],
    }
    ids: list[int] = []
    mask: list[int] = []
    turns = []
    for number, (content, reasoning, attempts, results) in enumerate(spoken[kind]):
        start = len(ids)
        text = ((reasoning or "") + content + "".join(attempt.raw for attempt in attempts)).encode("utf-8", "replace")
        ids += [*text[:200], _END]
        mask += [1] * (len(ids) - start)
        closed = not (kind == "cut" and attempts)
        turn = Turn(start, len(ids), content, reasoning, attempts, results, closed, 0.4, 0.1 + 0.8 * number)
        turns.append(turn)
        context = b"".join(result.content.encode("utf-8", "replace") for result in results)[:100]
        ids += context
        mask += [0] * len(context)
    reason = StopReason.LENGTH if kind == "cut" else StopReason.FINISHED
    logprobs = [-0.5 * (number % 4) if m else None for number, m in enumerate(mask)]
    prompt = tuple(said(f"What is {question} plus 2?").encode("utf-8", "replace")[:200])
    whole = Trajectory(
        prompt_ids=prompt,
        ids=tuple(ids),
        mask=tuple(mask),
        logprobs=tuple(logprobs),
        messages=({"role": "assistant", "content": said("see the turns")},),
        turns=tuple(turns),
        stop_reason=reason,
        started_s=99.1 + 0.01 * place,
        duration_s=0.6 + 0.8 * len(turns),
        failure=said("nothing") if kind == "cut" else None,
    )
    return cut_into_segments(whole, turns[-1].start) if kind == "repeats" else whole


def _see_tokens(recorder: EpisodeRecorder, batch: RolloutBatch) -> None:
    """Record what a training pass could have seen of the first episode."""
    one = batch.episodes[0].trajectory
    sampled = [1.0 if m else None for m in one.mask]
    trainer = [None if lp is None else lp - 0.001 for lp in one.logprobs]
    correction = [None if m is None else float(number % 3 > 0) for number, m in enumerate(sampled)]
    seen = {"trainer_logprobs": trainer, "entropy": sampled, "correction": correction, "advantage": None}
    recorder.tokens_seen({"step": batch.step, "episode": one.metadata["episode"], **seen}, list(one.ids))


def _step_line(batch: RolloutBatch, said: Said) -> dict[str, Any]:
    metrics = {
        "reward": sum(total or 0.0 for total in batch.totals) / len(batch),
        "success": sum(batch.successes) / len(batch),
        "entropy": 0.5,
        "step_time": 4.0,
        said("mine"): 1.0,
    }
    phases = {"before_rollout": 0.1, "rollout": 3.0, "scoring": 0.2, "training": 0.7}
    return {"kind": "step", "time": 0, "step": batch.step, "metrics": metrics, "phases": phases}


def _token_text(number: int, said: Said) -> dict[str, Any]:
    if number == _END:
        return {"text": said("<end>"), "special": True}
    return {"text": said(chr(number))} if number < 128 else {"text": "\ufffd", "bytes": f"{number:02x}"}
