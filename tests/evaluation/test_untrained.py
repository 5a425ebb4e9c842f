"""What episodes of an untrained model and made-up ones say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from toolgrpo.episode.dropped import Drop, DropCause
from toolgrpo.episode.trajectory import Trajectory
from toolgrpo.errors import RewardError
from toolgrpo.evaluation.before_training import WRITINGS, nonsense, rehearse, score_made_up, spread, untrained_facts
from toolgrpo.rewards import get_reward
from toolgrpo.rollout.batch import Grade, RolloutBatch, Scored
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedTools, run_episode


def episode(*turns: str) -> Trajectory:
    tools = ScriptedTools({"add": lambda a, b: str(a + b)})
    return run_episode(ScriptedEngine([ByteChat.say(turn) for turn in turns]), tools, max_turns=3)


WELL = ('call add {"a": 1, "b": 2}', "3")
BROKEN = ("call add {", "3")
NONE = ("3",)


def batch(*episodes: tuple[tuple[str, ...], float]) -> RolloutBatch:
    made = RolloutBatch(episodes=tuple(Scored({"prompt": "q"}, episode(*turns)) for turns, _ in episodes))
    return made.graded([Grade({}, total) for _, total in episodes], lambda one: one.total == 1.0)


@pytest.mark.parametrize(
    ("reward", "writing", "answer"), [("exact_match", "alone", "42"), ("math", "in a box", "x^2+1")]
)
def test_gold_answers_score_full_marks_and_nonsense_none(reward: str, writing: str, answer: str) -> None:
    rows, rewards = [{"prompt": "q", "answer": answer}], [get_reward(reward)]
    assert score_made_up(rows, WRITINGS[writing], rewards, None, 1.0).totals == (1.0,)
    assert score_made_up(rows, nonsense, rewards, None, 1.0).totals == (0.0,)


def test_a_reward_that_raises_on_an_episode_that_was_made_up_blames_no_row() -> None:
    def reward_func(completions: list[Any], **_: Any) -> list[float]:
        return [float(len(completion[-1]["content"].split()[0])) for completion in completions]

    with pytest.raises(RewardError, match=r"IndexError.* at an episode that toolgrpo made up: its answer is empty"):
        rehearse([{"prompt": "q", "answer": "3"}] * 3, None, [reward_func])


def test_calls_groups_and_pass_at_k() -> None:
    facts = untrained_facts(batch((WELL, 1.0), (BROKEN, 0.0), (NONE, 0.5), (NONE, 0.5)), k=2)
    assert (facts.n, facts.k, facts.episodes) == (2, 2, 4)
    assert facts.calling == 0.25 and facts.calls == 2 and facts.malformed == {"invalid_json": 1} and not facts.failed
    assert facts.live == 0.5 and facts.pass_1 == 0.25 and facts.pass_k == 0.5
    assert facts.stops == {"finished": 4} and facts.rewards == (1.0, 0.0, 0.5, 0.5)
    assert facts.mixed == 1, "the second group has no success"
    both = batch((WELL, 1.0), (NONE, 1.0))
    lost = replace(
        both, episodes=(both.episodes[0], replace(both.episodes[1], success=None, drop=Drop(DropCause.TOOL, "")))
    )
    assert untrained_facts(lost, k=2).mixed == 0, "an episode that was dropped is no failure"
    dropped = replace(both.episodes[1], success=None, drop=Drop(DropCause.TOOL, ""))
    assert (
        untrained_facts(replace(both, episodes=(both.episodes[0], both.episodes[0], dropped, dropped)), k=2).pass_k
        == 1.0
    )


def test_episodes_that_a_limit_cuts_though_they_call_well() -> None:
    calls = [f'call add {{"a": {number}, "b": 2}}' for number in range(3)]
    again, failed = ((calls[0],) * 3, 0.0), ((*["call sub {}"] * 3,), 0.0)
    facts = untrained_facts(batch(((*calls,), 0.0), again, failed, (WELL, 1.0)), k=2)
    assert facts.stops == {"max_turns": 3, "finished": 1}
    assert (facts.callers, facts.cut) == (4, 1), "more turns help none that repeats itself"


def test_a_task_that_never_succeeds_is_told_apart() -> None:
    played = episode(*NONE)

    def of(row: dict[str, str], total: float, n: int = 8) -> list[tuple[Scored, Grade]]:
        return [(Scored({"prompt": "q", **row}, played), Grade({}, total))] * n

    def never(*episodes: tuple[Scored, Grade]) -> dict[str, int]:
        scored, grades = zip(*episodes, strict=True)
        graded = RolloutBatch(episodes=scored).graded(grades, lambda one: one.total == 1.0)
        return dict(untrained_facts(graded, k=2).never)

    chains, sums = {"task": "chains"}, of({"task": "sums"}, 1.0)
    assert never(*of(chains, 0.0), *sums) == {"chains": 8}
    assert never(*of(chains, 0.0, 6), *sums) == {}, "six episodes say too little"
    assert never(*of(chains, 0.0), *of({"task": "sums"}, 0.0)) == {}, "nothing succeeds, which is another finding"
    assert never(*of({}, 0.0), *sums) == {}
    lost = [(one, Grade({}, None, Drop(DropCause.TOOL, ""))) for one, _ in of(chains, 0.0, 2)]
    assert never(*of(chains, 0.0, 6), *lost, *sums) == {}, "what was dropped is no failure"


def test_a_distribution_in_words() -> None:
    assert spread(range(101)) == "median 50, 95 % within 95, longest 100"
