"""Conversations for supervised training from the recording of a run: its successes, each kind once.

An episode is left out if it is no success, if one of its calls could not be run (it teaches a wrong form), if it ends without
an answer, or if an earlier one says the same; for `near` duplicates, if it has the same question, or the same calls with the
same results. Spaces, case, and punctuation at the end of a word make no other question. Of a training only what it drew to
learn from is used: the episodes of its measurements, between the steps, are of held-out rows.

Not covered: whether a success was luck; questions that say the same in other words.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolgrpo.episode.tool_calls import AttemptStatus
from toolgrpo.episode.trajectory import Message
from toolgrpo.observe.records import iter_episodes, shown_prompt

_ENDS_OF_WORDS = re.compile(r"[.,;:?!'\"]+(?=\s|$)|(?<!\S)['\"]+")


@dataclass(slots=True)
class RunExamples:
    """The conversations of a run, and why its other episodes are none."""

    # messages, of them a prompt; names of tools or None; the row's own switch of thinking
    conversations: list[dict[str, Any]] = field(default_factory=list)
    n_episodes: int = 0
    left_out: Counter[str] = field(default_factory=Counter)  # by the reason

    def __str__(self) -> str:
        why = "; ".join(f"{n} {reason}" for reason, n in self.left_out.most_common())
        return f"{len(self.conversations)} of {self.n_episodes} episodes{f' ({why})' if why else ''}"


def is_training(folder: Path) -> bool:
    """Return whether a recording is that of a training."""
    return any(record.get("mode") == "train" for record in iter_episodes(folder))


def run_examples(records: Iterable[Mapping[str, Any]], *, near: bool = True, of_training: bool = False) -> RunExamples:
    """Choose the examples among the episodes of a recording, in their order."""
    found, questions, calls = RunExamples(), set[str](), set[str]()
    for record in records:
        found.n_episodes += 1
        messages, attempts = record["messages"], [one for turn in record["turns"] for one in turn["attempts"]]
        prompt = shown_prompt(record)
        conversation = [*prompt, *map(_without_ids, messages)]
        question = _question(record) if near else json.dumps(conversation)
        made = _calls(record) if near else question
        if of_training and record.get("mode") != "train":
            found.left_out["of held-out rows"] += 1
        elif not record.get("success"):
            found.left_out["without success"] += 1
        elif any(attempt["status"] != AttemptStatus.OK for attempt in attempts):
            found.left_out["with a call that could not be run"] += 1
        elif not messages or messages[-1]["role"] != "assistant" or not _text(messages[-1]):
            found.left_out["without an answer"] += 1
        elif question in questions:
            found.left_out["with the question of an earlier one" if near else "that repeat an earlier one"] += 1
        elif made in calls:
            found.left_out["with the calls of an earlier one"] += 1
        else:
            row = record["row"]
            of_row = {"offered": row.get("tools"), "hidden": row.get("hidden_tools") or []}
            of_row["enable_thinking"] = row.get("enable_thinking")
            found.conversations.append({"messages": conversation, "n_prompt": len(prompt), **of_row})
            questions.add(question)
            calls.update([made] if attempts else [])
    return found


def offered(schemas: Iterable[Mapping[str, Any]], conversation: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the tools that the row of a conversation was shown."""
    shown, hidden = conversation["offered"], conversation["hidden"]
    names = [(schema, schema["function"]["name"]) for schema in schemas]
    return [schema for schema, name in names if (shown is None or name in shown) and name not in hidden]


def _question(record: Mapping[str, Any]) -> str:
    """Return what the user says in the whole conversation, in a form that spelling does not change."""
    users = [_text(one) for one in (*shown_prompt(record), *record["messages"]) if one["role"] == "user"]
    return " ".join(_ENDS_OF_WORDS.sub("", "\n".join(users)).casefold().split())


def _calls(record: Mapping[str, Any]) -> str:
    """Return the calls of an episode with their results, as text; arguments in any order are the same."""
    made = [
        [attempt["name"], attempt["arguments"], result["content"]]
        for turn in record["turns"]
        for attempt, result in zip(turn["attempts"], turn["results"], strict=False)
    ]
    return json.dumps(made, sort_keys=True)


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else "" if content is None else json.dumps(content)


def _without_ids(message: Message) -> Message:
    """Return a message without ids of calls, which each family writes in its own form."""
    shown = {key: value for key, value in message.items() if key != "tool_call_id"}
    if shown.get("tool_calls"):
        shown["tool_calls"] = [{key: one[key] for key in one if key != "id"} for one in shown["tool_calls"]]
    return shown
