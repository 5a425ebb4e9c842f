"""Batches whose dead groups are replaced, against the same groups sampled at once; over a scripted model."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from tests.support.meeting import Meeting
from tests.support.rollouts import scripted_rollouts
from tests.support.trainings import KeptBatches, recorded, run_to_end, same_weights, step_logs, varied
from toolgrpo.engines.base import SampleRequest, SamplingOptions
from toolgrpo.errors import ConfigError, PeerError
from toolgrpo.evaluation.grading import Grading
from toolgrpo.learning.advantages import Shaping
from toolgrpo.observe.records import read_episodes
from toolgrpo.rewards.base import Reward
from toolgrpo.support.barrier import Processes
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedReply, tiny_trainer
from toolgrpo.testing.engine import Script
from toolgrpo.trainer.batches import Batches, StepGroups, TakenBatch
from toolgrpo.trainer.row_order import QueueRule, RowOrder, Training

pytestmark = pytest.mark.e2e

DEAD = {0, 2, 3, 6}  # rows whose groups are all alike


def rows(*numbers: int) -> list[dict[str, Any]]:
    return [{"prompt": f"question {number}", "answer": str(number), "number": number} for number in numbers]


def speaker() -> Script:
    """What is answered depends on the question and on how often it was asked."""
    asked: Counter[str] = Counter()

    def answer(request: SampleRequest, number: int) -> list[int]:
        text = ByteChat.text(request.ids)
        asked[text] += 1
        return ByteChat.say("abcdefghijklm"[: (sum(request.ids) + asked[text] * 3) % 11 + 1])

    return answer


def lengths(number: list[int], trajectories: list[Any], **_: Any) -> list[float]:
    return [0.5 if n in DEAD else float(len(t.ids) % 4) for n, t in zip(number, trajectories, strict=True)]


def sometimes(number: list[int], trajectories: list[Any], **_: Any) -> list[float | None]:
    sizes = [(n, len(t.ids)) for n, t in zip(number, trajectories, strict=True)]
    return [None if size % 3 == 0 or n in DEAD else float(size) for n, size in sizes]


async def judged(number: list[int], trajectories: list[Any], log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
    await asyncio.sleep(0.01)
    log_metric("judge/length", float(len(number)))
    log_extra("numbers", list(number))
    return [1.0 if n in DEAD else float(len(t.ids) % 5) for n, t in zip(number, trajectories, strict=True)]


def train(folder: Path, rewards: Any, data: list[dict[str, Any]], **changes: Any) -> tuple[Any, KeptBatches]:
    kept = KeptBatches()
    options = {"max_steps": 1, "learning_rate": 1e-2, "shuffle_dataset": False, **changes}
    trainer = tiny_trainer(folder, rewards, speaker(), rows=data, parts={"observers": [kept]}, **options)
    return run_to_end(trainer), kept


def logged(trainer: Any, *names: str) -> list[dict[str, Any]]:
    return [{name: log.get(name) for name in names} for log in step_logs(trainer)]


LOGGED = ("loss", "grad_norm", "reward_std", "rewards/lengths/mean", "rewards/sometimes/mean", "entropy")


@pytest.mark.parametrize(
    ("rewards", "changes"),
    [
        ([lengths, sometimes], {"reward_weights": [1.0, 0.25], "scale_rewards": "batch"}),
        ([lengths, judged], {"multi_objective_aggregation": "normalize_then_sum", "loss_type": "dr_grpo"}),
        (
            Reward(lengths, "lengths", "a test"),
            {"per_device_train_batch_size": 2, "steps_per_generation": 4, "max_steps": 8, "num_iterations": 2},
        ),
    ],
    ids=["None", "async, and normalized first", "a batch for several steps"],
)
def test_it_trains_as_if_the_admitted_groups_were_sampled_at_once(tmp_path: Path, rewards: Any, changes: Any) -> None:
    drawn, kept = train(tmp_path / "drawn", rewards, rows(*range(8)), dynamic_sampling="backfill", **changes)
    at_once, _ = train(tmp_path / "at_once", rewards, rows(1, 4), **changes)
    assert [one.row["number"] for one in kept.batches[0].episodes if one.trained] == [1] * 4 + [4] * 4
    assert logged(drawn, *LOGGED) == logged(at_once, *LOGGED)
    assert max(log["grad_norm"] for log in logged(drawn, "grad_norm")) > 0
    assert same_weights(drawn, at_once)
    (first, *_) = logged(drawn, "reward_trained", "judge/length")
    (expected, *_) = logged(at_once, "reward", "judge/length")
    assert first["reward_trained"] == expected["reward"]
    if expected["judge/length"] is not None:
        assert (first["judge/length"], expected["judge/length"]) == (4.0, 8.0), "a group is asked about at a time"


def test_what_was_drawn_and_what_was_trained_on_is_logged_recorded_and_told(tmp_path: Path) -> None:
    asked: list[int] = []

    def counted(number: list[int], trajectories: list[Any], **_: Any) -> list[float]:
        asked.extend(id(t.ids) for t in trajectories)
        return [1.0 if n == 0 else 0.0 if n in DEAD else float(i % 2) for i, n in enumerate(number)]

    trainer, kept = train(tmp_path, counted, rows(*range(8)), dynamic_sampling="backfill")
    (batch,) = kept.batches
    assert [one.row["number"] for one in batch.episodes] == [n for n in range(5) for _ in range(4)]
    assert len(asked) == len(set(asked)) == 20, "once per episode"
    assert [t.metadata["episode"] for t in batch.trajectories] == list(range(20))
    assert trainer.rollout_batches.n_episodes == 20
    (log,) = step_logs(trainer)
    counts = ("groups_drawn", "dead_all_failed", "dead_all_solved", "live_rate")
    assert [log[f"sampling/{name}"] for name in counts] == [5, 2, 1, 0.4]
    assert log["reward"] == log["success"] == pytest.approx(8 / 20) and log["reward_trained"] == 0.5
    replaced = [r["row"]["number"] for r in read_episodes(tmp_path / "episodes.jsonl") if not r.get("trained", True)]
    assert replaced == [0] * 4 + [2] * 4 + [3] * 4


def test_a_run_resumed_inside_a_batch_draws_what_the_run_that_never_stopped_draws(tmp_path: Path) -> None:
    def reward(trajectories: list[Any], number: list[int], **_: Any) -> list[float]:
        alike = [(len(trajectories[0].ids) + n) % 3 for n in number]
        return [1.0 if same else float(sum(t.ids) % 2) for same, t in zip(alike, trajectories, strict=True)]

    options: dict[str, Any] = {
        **{"dynamic_sampling": "backfill", "learning_rate": 1e-2, "lr_scheduler_type": "constant"},
        **{"save_strategy": "steps", "save_steps": 3, "per_device_train_batch_size": 2, "steps_per_generation": 4},
    }

    def run(name: str, max_steps: int, resume: str | None = None) -> Any:
        changes = {"max_steps": max_steps, "max_turn_tokens": 12, **options}
        return run_to_end(tiny_trainer(tmp_path / name, reward, varied, rows=rows(*range(11)), **changes), resume)

    whole = run("whole", 6)
    run("stopped", 3)
    resumed = run("stopped", 6, resume="auto")
    assert recorded(tmp_path / "stopped") == recorded(tmp_path / "whole")
    assert resumed.rollout_batches.n_episodes == whole.rollout_batches.n_episodes
    assert resumed.rollout_batches.groups.order.state() == whole.rollout_batches.groups.order.state()
    names = ("loss", "reward", "reward_trained", "sampling/groups_drawn")
    assert logged(resumed, *names) == logged(whole, *names)
    assert max(log["sampling/groups_drawn"] or 0 for log in logged(whole, *names)) > 2, "some were replaced"
    assert same_weights(resumed, whole)


def test_data_that_cannot_be_drawn_by_number_is_refused_at_the_start(tmp_path: Path) -> None:
    parts = {"train_dataset": Dataset.from_list(rows(1, 2)).to_iterable_dataset()}
    with pytest.raises(ConfigError, match="IterableDataset"):
        tiny_trainer(tmp_path, lengths, speaker(), parts=parts, dynamic_sampling="backfill")


@pytest.mark.parametrize(("n_processes", "n_rows"), [(2, 6), (3, 4), (4, 2), (2, 8)])
def test_groups_that_lie_in_two_slices_are_dealt_out_whole(n_processes: int, n_rows: int) -> None:
    """Three groups of four for two processes, four for three of them, two for four, and whole ones."""
    meeting, steps = Meeting(n_processes), 3

    def process(number: int) -> tuple[list[TakenBatch], str]:
        batches = batches_of(number, n_processes, meeting, speaker(), lambda row: row % 5 not in (1, 2), replaces=True)
        assert batches.groups is not None
        return [batches.take([{}] * n_rows) for _ in range(steps)], str(batches.groups.order.state())

    results = in_threads(n_processes, process)
    assert meeting.met == dict.fromkeys(range(n_processes), steps)
    seen: list[int] = []
    for step in range(steps):
        taken = [batches[step] for batches, _ in results]
        assert [len(one.scored) for one in taken] == [n_rows] * n_processes
        scored = [one for batch in taken for one in batch.scored]
        assert all(one.row["prompt"] in ByteChat.text(one.trajectory.prompt_ids) for one in scored)
        numbers, values = (
            [one.row["number"] for one in scored],
            [v for batch in taken for v, *_ in batch.answers.values],
        )
        assert numbers == [number for number in numbers[::4] for _ in range(4)], "a group's rows stand together"
        assert values == [0.0, 1.0, 0.0, 1.0] * (len(numbers) // 4), "all of them live"
        assert len({(batch.reward, str(batch.metrics_of_all)) for batch in taken}) == 1
        seen += [one.row["number"] for batch in taken for one in batch.ran.episodes[::4]]
    episodes = [t.metadata["episode"] for batches, _ in results for one in batches for t in one.ran.trajectories]
    assert sorted(episodes) == list(range(len(episodes))), "each episode has a number of its own"
    assert len(seen) == len(set(seen)), "no row was drawn by two processes"
    assert len({order for _, order in results}) == 1


@pytest.mark.parametrize("replaces", [False, True])
def test_processes_share_the_rows_and_meet_only_when_a_step_is_taken(replaces: bool) -> None:
    """Two processes of two groups a step, each with slow groups of its own; after two steps both begin anew."""
    steps, meeting = 4, Meeting(2)
    dead = {1, 3, 4, 9}

    def process(number: int) -> tuple[list[int], Any]:
        def slow(request: SampleRequest, _: int) -> ScriptedReply:
            row = int(ByteChat.text(request.ids).split("question ")[1][:2])
            return ScriptedReply(ByteChat.say("an answer"), delay_s=0.1 * (row in {number, number + 4}))

        at = [0]
        training = {"step": lambda: at[0], "left": lambda: steps - at[0]}
        options: dict[str, Any] = {"staleness": 1, "replaces": replaces, "training": training}
        order, trained = RowOrder(32, lambda epoch: range(32)), list[int]()
        for step in range(steps):
            at[0] = step
            if step in (0, 2):
                batches = batches_of(number, 2, meeting, slow, lambda row: row not in dead, order=order, **options)
            rows = [one.row["number"] for one in batches.take([{}] * 8).scored]
            assert rows == [row for row in rows[::4] for _ in range(4)]
            trained += rows[::4]
            if step in (1, 3):
                batches.stop()
        return trained, order.state()

    (one, state), (other, its_state) = in_threads(2, process)
    assert state == its_state and len(one) == len(other)
    assert meeting.met == dict.fromkeys(range(2), steps if replaces else 2 * steps), "after rollouts, and after rewards"
    live = [row for row in range(32) if not replaces or row not in dead]
    assert sorted(one + other) == live[: 2 * steps * 2], "every row once, in whichever process"


def test_a_process_that_fails_stops_the_others_with_a_checkpoint() -> None:
    meeting = Meeting(2)
    saved: list[int] = []

    def process(number: int) -> Exception | None:
        def answers(request: SampleRequest, _: int) -> list[int]:
            if number:
                raise AssertionError("a bug of the engine")
            return ByteChat.say("an answer")

        training = {"step": lambda: 3, "save": lambda: saved.append(number)}
        batches = batches_of(number, 2, meeting, answers, lambda row: True, staleness=1, training=training)
        try:
            batches.take([{}] * 4)
        except Exception as error:
            return error
        return None

    told, failed = in_threads(2, process)
    assert isinstance(told, PeerError) and "process 1 failed first" in str(told)
    assert isinstance(failed, AssertionError) and sorted(saved) == [0, 1]


def batches_of(
    number: int, n: int, meeting: Meeting, script: Script, live: Callable[[int], bool], **options: Any
) -> Batches:
    """The batches of one of `n` processes, in groups of four, over rows that are `live` or not."""
    data = [{"prompt": f"question {row:02}", "number": row} for row in range(50)]
    rollouts = scripted_rollouts(ScriptedEngine(script))
    processes = Processes(n, number, partial(meeting.gather, number), partial(meeting.meet, number))
    order = options.pop("order", None) or RowOrder(50, lambda epoch: range(50))
    training: dict[str, Any] = {
        **{"step": lambda: 0, "left": lambda: 9, "weights": lambda: iter(()), "load_weights": lambda: 0},
        **{"save": lambda: None, "log": lambda metrics: None, **options.pop("training", {})},
    }
    rule = QueueRule(sampling=SamplingOptions(), group_size=4, most_groups=4.0, **options)
    groups = StepGroups(rollouts, order, data.__getitem__, rule, Training(**training), processes)

    def reward(number: list[int], **_: Any) -> list[float]:
        return [float(place % 2) if live(row) else 1.0 for place, row in enumerate(number)]

    grading = Grading([reward], [1.0], lambda scored: bool(scored.total), ["r"])
    return Batches(lambda rows: rollouts.run(rows, SamplingOptions()), grading, Shaping(), processes, groups)


def in_threads(n: int, process: Callable[[int], Any]) -> list[Any]:
    """What each of these processes returns, one thread each."""
    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(process, range(n), timeout=60))
