"""Rewards outside of training get what they get in training, and success means one thing."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerState

from toolgrpo.data import load_tasks
from toolgrpo.episode.token_ledger import Ledger
from toolgrpo.episode.trajectory import Message, StopReason, Trajectory
from toolgrpo.errors import ConfigError, DataError, RewardError
from toolgrpo.evaluation.grading import Grading, grade, success_at
from toolgrpo.rewards import get_reward
from toolgrpo.rewards.base import Reward, watched
from toolgrpo.rollout.batch import RolloutBatch, Scored


def said(text: str, *before: Message) -> Trajectory:
    ledger = Ledger([1])
    ledger.sampled([2], [-0.5])
    ledger.say(*before, {"role": "assistant", "content": text})
    return ledger.finish(StopReason.FINISHED)


def asked(*episodes: tuple[dict[str, Any], Trajectory]) -> RolloutBatch:
    return RolloutBatch(episodes=tuple(Scored(row, trajectory) for row, trajectory in episodes), step=7)


BATCH = asked(({"prompt": "q", "answer": "1"}, said("1")), ({"prompt": "q", "answer": "2"}, said("1")))


def right(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
    return [float(c[-1]["content"] == a) for c, a in zip(completions, answer, strict=True)]


def tokens(completion_ids: list[list[int]], trajectories: list[Trajectory], **_: object) -> list[float]:
    assert [list(t.ids) for t in trajectories] == completion_ids
    return [0.5] * len(completion_ids)


def test_grading_gives_rewards_what_training_gives_them_and_copies_of_it() -> None:
    def rewrites(completions: list[Any], **_: object) -> list[float]:
        completions[0][-1]["content"] = "changed"
        return [0.0, 0.0]

    def uses_up(prompts: list[Any], wanted: list[list[str]], **_: object) -> list[float]:
        return [float(bool(one) and one.pop() == "a") for one in wanted]

    row = {"prompt": "q", "wanted": ["a"]}

    def counts(wanted: list[list[str]], **_: object) -> list[float]:
        return [float(len(one)) for one in wanted]

    siblings = grade(asked((row, said("1")), (row, said("1"))), [uses_up, counts], threshold=1.0)
    assert siblings.totals == (2.0, 2.0) and row["wanted"] == ["a"]
    graded = grade(BATCH, [right, tokens, rewrites], threshold=1.5)
    assert graded.trajectories[0].messages[-1]["content"] == "1"
    assert graded.totals == (1.5, 0.5) and graded.successes == (True, False)
    assert graded.episodes[1].rewards == {"rewrites": 0.0, "right": 0.0, "tokens": 0.5}
    assert grade(BATCH, [right, tokens], weights=[1.0, 2.0], threshold=1.0).totals == (2.0, 1.0)


def test_rewards_read_what_an_environment_said_first_as_the_model_did() -> None:
    seen: list[Any] = []

    def keep(prompts: list[Any], **_: Any) -> list[float]:
        seen.extend(prompts)
        return [1.0] * len(prompts)

    messages = [{"role": "user", "content": "q"}]
    one, other = (replace(said("1"), metadata={"observation": f" ({n})"}) for n in range(2))
    batch = asked(({"prompt": "q"}, one), ({"prompt": messages}, other), ({"prompt": "q"}, said("1")))
    grade(batch, [keep], threshold=1.0)
    assert seen == ["q (0)", [{"role": "user", "content": "q (1)"}], "q"] and messages[0]["content"] == "q"


def test_rewards_may_log_and_ask_for_the_state_of_the_trainer() -> None:
    def talks(
        completions: Any, trainer_state: TrainerState, log_metric: Any, log_extra: Any, prompts: Any, **_: Any
    ) -> list[float]:
        assert trainer_state.global_step == 7 and prompts == ["q", "q"]
        log_metric("talks/share", 0.5)
        log_extra("words", ["a", "b"])
        return [1.0, 1.0]

    grading = Grading([talks], [1.0], success_at(1.0), ["talks"])
    answers = grading.ask([one.row for one in BATCH.episodes], BATCH.trajectories, step=7)
    assert answers.metrics == {"talks/share": [0.5]} and answers.columns == {"words": ["a", "b"]}


def test_a_process_without_episodes_asks_a_model_as_often_as_the_others() -> None:
    asked: list[int] = []
    model = torch.nn.Linear(1, 1)

    def ask(number: int, *_: Any) -> list[float]:
        asked.append(number)
        return []

    grading = Grading([model], [1.0], success_at(1.0), ["m"], ask_model=ask)
    assert grading.ask([], []).values == () and asked == [0], "it may be split among them"


def test_a_built_in_that_logs_and_one_that_asks_for_the_prompt() -> None:
    def about(completions: list[Any], prompt: list[str]) -> list[float]:
        return [float(len(text)) for text in prompt]

    graded = grade(BATCH, [get_reward("tool_use"), Reward(about, "about", "here")], threshold=1.0)
    assert graded.totals == (1.0, 1.0)


def test_a_reward_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="Linear is a reward model"):
        grade(BATCH, [torch.nn.Linear(1, 1)], threshold=1.0)


def test_success_is_the_measure_that_the_row_brings_and_else_the_threshold() -> None:
    """In a mixture too: the embedded task wants the answer said after the tool gave it, whatever its reward says."""
    row = {"prompt": "q", "answer": "7"}
    before = ({"role": "assistant", "content": "", "tool_calls": [{}]}, {"role": "tool", "name": "add", "content": "7"})
    right, wrong = said("It is 7.", *before), said("It is 8.", *before)
    by_measure, without = {**row, "success_measure": "arithmetic"}, {**row, "success_measure": None}
    batch = asked((by_measure, right), (by_measure, wrong), (without, wrong), (row, wrong))
    graded = grade(batch, [get_reward("accuracy")], threshold=1.0)
    assert graded.totals == (1.0, 1.0, 1.0, 1.0)
    assert graded.successes == (True, False, True, True)


def test_the_rows_of_the_embedded_task_bring_their_measure_and_an_unknown_one_is_a_bad_row(tmp_path: Path) -> None:
    rows, mixture = tmp_path / "rows.jsonl", tmp_path / "mixture.yaml"
    rows.write_text('{"prompt": "q", "answer": "1"}\n')
    mixture.write_text(f"tasks:\n- data: arithmetic\n- data: {rows}\n")
    assert {row["success_measure"] for row in load_tasks(mixture)} == {"arithmetic", None}
    rows.write_text('{"prompt": "q", "success_measure": "arithmetics"}\n')
    with pytest.raises(DataError, match=r"rows.jsonl.*'arithmetics'"):
        load_tasks(rows)


def test_rounding_of_fp32_decides_nothing() -> None:
    total = torch.tensor(0.9).item()
    assert total < 0.9
    assert success_at(0.9)(Scored({}, said("x"), total=total))
    assert not success_at(0.9)(Scored({}, said("x"), total=0.89))
    assert not success_at(0.9)(Scored({}, said("x")))


def returns_nan(completions: list[Any], **_: object) -> list[float]:
    return [math.nan if c[-1]["content"] == "wrong" else 1.0 for c in completions]


def raises(completions: list[Any], **_: object) -> list[float]:
    return [1 / (completion[-1]["content"] != "wrong") for completion in completions]


@pytest.mark.parametrize(
    ("reward", "columns"),
    [
        (returns_nan, {}),
        (raises, {}),
        (get_reward("gsm8k"), {"answer": "no number"}),
        (get_reward("code_exec"), {"tests": " "}),
        (get_reward("by_task"), {"answer": "no number", "reward": "gsm8k"}),
        (get_reward("by_task"), {"reward": None}),
    ],
)
@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_an_error_names_file_and_line(tmp_path: Path, reward: Any, columns: dict[str, Any], timeout_s: float) -> None:
    file = tmp_path / "rows.jsonl"
    row = {"reward": "exact_match", "tests": "assert f"}
    rows = [{**row, "prompt": f"question {n}", "answer": str(n)} for n in range(4)]
    rows[2] |= columns
    file.write_text("\n" + "".join(json.dumps(row) + "\n" for row in rows))
    loaded = list(load_tasks(str(file)))
    batch = asked(*((loaded[n], said("wrong" if n == 2 else "1")) for n in (0, 3, 2, 1)))
    with pytest.raises(RewardError, match=f"{file}, line 4\\b"):
        grade(batch, watched([reward], timeout_s), threshold=1.0)
    file.unlink()
    with pytest.raises(RewardError, match=r"\brow 2\b"):
        grade(batch, watched([reward], timeout_s), threshold=1.0)
