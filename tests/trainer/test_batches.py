"""Batches whose dead groups are replaced, against the same groups sampled at once; over a scripted model."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from datasets import IterableDataset

from tests.support.meeting import Meeting
from tests.support.rollouts import scripted_rollouts
from tests.support.trainings import KeptBatches, recorded, run_to_end, same_weights, step_logs, varied
from toolgrpo.engines.base import SampleRequest, SamplingOptions
from toolgrpo.errors import ConfigError, PeerError
from toolgrpo.evaluation.grading import Grading
from toolgrpo.learning.shaping import Shaping
from toolgrpo.observe.records import read_episodes
from toolgrpo.rewards.base import Reward
from toolgrpo.support.barrier import Processes
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedReply, tiny_trainer
from toolgrpo.trainer.batches import Batches, StepGroups, TakenBatch
from toolgrpo.trainer.row_order import QueueRule, RowOrder, Training

pytestmark = pytest.mark.e2e

DEAD = {0, 2, 3, 6}  # rows whose groups are all alike


def rows(*numbers: int) -> list[dict[str, Any]]:
    return [{"prompt": f"question {number}", "answer": str(number), "number": number} for number in numbers]


class Speaker:
    """A script: what is answered depends on the question and on how often it was asked."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    def __call__(self, request: SampleRequest, number: int) -> list[int]:
        text = ByteChat.text(request.ids)
        self.asked[text] += 1
        return ByteChat.say("abcdefghijklm"[: (sum(request.ids) + self.asked[text] * 3) % 11 + 1])


def lengths(number: list[int], trajectories: list[Any], **_: Any) -> list[float]:
    return [0.5 if n in DEAD else float(len(t.ids) % 4) for n, t in zip(number, trajectories, strict=True)]


def sometimes(number: list[int], trajectories: list[Any], **_: Any) -> list[float | None]:
    return [
        None if len(t.ids) % 3 == 0 or n in DEAD else float(len(t.ids))
        for n, t in zip(number, trajectories, strict=True)
    ]


async def judged(number: list[int], trajectories: list[Any], log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
    await asyncio.sleep(0.01)
    log_metric("judge/length", float(len(number)))
    log_extra("numbers", list(number))
    return [1.0 if n in DEAD else float(len(t.ids) % 5) for n, t in zip(number, trajectories, strict=True)]


def train(folder: Path, rewards: Any, data: list[dict[str, Any]], **changes: Any) -> tuple[Any, KeptBatches]:
    kept = KeptBatches()
    options = {"max_steps": 1, "learning_rate": 1e-2, "shuffle_dataset": False, **changes}
    parts = {"observers": [kept]}
    return run_to_end(tiny_trainer(folder, rewards, Speaker(), rows=data, parts=parts, **options)), kept


def logged(trainer: Any, *names: str) -> list[dict[str, Any]]:
    return [{name: log.get(name) for name in names} for log in step_logs(trainer)]


LOGGED = ("loss", "grad_norm", "reward_std", "rewards/lengths/mean", "rewards/sometimes/mean", "entropy")


@pytest.mark.parametrize(
    ("rewards", "changes"),
    [
        pytest.param([lengths, sometimes], {"reward_weights": [1.0, 0.25], "scale_rewards": "batch"}, id="None"),
        pytest.param(
            [lengths, judged],
            {"multi_objective_aggregation": "normalize_then_sum", "loss_type": "dr_grpo"},
            id="async, and normalized first",
        ),
        pytest.param(
            Reward(lengths, "lengths", "a test"),
            {"per_device_train_batch_size": 2, "steps_per_generation": 4, "max_steps": 8, "num_iterations": 2},
            id="a batch for several steps",
        ),
    ],
)
def test_it_trains_as_if_the_admitted_groups_had_been_sampled_at_once(
    tmp_path: Path, rewards: Any, changes: dict[str, Any]
) -> None:
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
    recorded = read_episodes(tmp_path / "episodes.jsonl")
    assert [r["row"]["number"] for r in recorded if not r.get("trained", True)] == [
        n for n in (0, 2, 3) for _ in range(4)
    ]


def test_a_run_resumed_inside_a_batch_draws_what_the_run_that_never_stopped_draws(tmp_path: Path) -> None:
    def reward(trajectories: list[Any], number: list[int], **_: Any) -> list[float]:
        return [
            1.0 if (len(trajectories[0].ids) + n) % 3 else float(sum(t.ids) % 2)
            for n, t in zip(number, trajectories, strict=True)
        ]

    def run(folder: Path, max_steps: int, resume: str | None = None) -> Any:
        trainer = tiny_trainer(
            folder,
            reward,
            varied,
            rows=rows(*range(11)),
            dynamic_sampling="backfill",
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            max_steps=max_steps,
            max_turn_tokens=12,
            save_strategy="steps",
            save_steps=3,
            per_device_train_batch_size=2,
            steps_per_generation=4,
        )
        return run_to_end(trainer, resume)

    whole = run(tmp_path / "whole", 6)
    run(tmp_path / "stopped", 3)
    resumed = run(tmp_path / "stopped", 6, resume="auto")
    assert recorded(tmp_path / "stopped") == recorded(tmp_path / "whole")
    assert resumed.rollout_batches.n_episodes == whole.rollout_batches.n_episodes
    assert resumed.rollout_batches.groups.order.state() == whole.rollout_batches.groups.order.state()
    names = ("loss", "reward", "reward_trained", "sampling/groups_drawn")
    assert logged(resumed, *names) == logged(whole, *names)
    assert max(log["sampling/groups_drawn"] or 0 for log in logged(whole, *names)) > 2, "some were replaced"
    assert same_weights(resumed, whole)


def test_data_that_cannot_be_drawn_by_number_is_refused_at_the_start(tmp_path: Path) -> None:
    def stream() -> Iterator[dict[str, Any]]:
        yield from rows(1, 2)

    with pytest.raises(ConfigError, match="IterableDataset"):
        parts = {"train_dataset": IterableDataset.from_generator(stream)}
        tiny_trainer(tmp_path, lengths, Speaker(), parts=parts, dynamic_sampling="backfill")


@pytest.mark.parametrize(("n_processes", "n_rows"), [(2, 6), (3, 4), (4, 2), (2, 8)])
def test_groups_that_lie_in_two_slices_are_dealt_out_whole(n_processes: int, n_rows: int) -> None:
    """Three groups of four for two processes, four for three of them, two for four, and whole ones."""
    meeting, steps = Meeting(n_processes), 3
    results: dict[int, list[TakenBatch]] = {}
    orders: dict[int, Any] = {}

    def process(number: int) -> None:
        batches = batches_of(
            number, n_processes, meeting, ScriptedEngine(Speaker()), lambda row: row % 5 not in (1, 2), replaces=True
        )
        for _ in range(steps):
            results.setdefault(number, []).append(batches.take([{}] * n_rows))
        assert batches.groups is not None
        orders[number] = batches.groups.order

    in_threads(n_processes, process)
    assert sorted(results) == list(range(n_processes)) and all(len(one) == steps for one in results.values())
    assert meeting.met == dict.fromkeys(range(n_processes), steps)
    seen: list[int] = []
    for step in range(steps):
        taken = [results[number][step] for number in range(n_processes)]
        assert [len(one.scored) for one in taken] == [n_rows] * n_processes
        whole = [
            (one.row["number"], values[0])
            for batch in taken
            for one, values in zip(batch.scored, batch.answers.values, strict=True)
        ]
        groups = [whole[start : start + 4] for start in range(0, len(whole), 4)]
        assert all(len({number for number, _ in group}) == 1 for group in groups), "a group's rows stand together"
        assert all([value for _, value in group] == [0.0, 1.0, 0.0, 1.0] for group in groups), "all of them live"
        for batch in taken:
            for one in batch.scored:
                assert one.row["prompt"] in ByteChat.text(one.trajectory.prompt_ids)
        assert len({(batch.reward, str(batch.metrics_of_all)) for batch in taken}) == 1
        seen += [one.row["number"] for batch in taken for one in batch.ran.episodes[::4]]
    numbers = [t.metadata["episode"] for one in results.values() for batch in one for t in batch.ran.trajectories]
    assert sorted(numbers) == list(range(len(numbers))), "each episode has a number of its own"
    assert len(seen) == len(set(seen)), "no row was drawn by two processes"
    assert len({str(order.state()) for order in orders.values()}) == 1


@pytest.mark.parametrize("replaces", [False, True])
def test_processes_share_the_rows_and_meet_only_when_a_step_is_taken(replaces: bool) -> None:
    """Two processes of two groups a step, each with slow groups of its own; after two steps both begin anew."""
    n, steps, meeting = 2, 4, Meeting(2)
    dead = {1, 3, 4, 9}
    trained: dict[tuple[int, int], list[int]] = {}
    states: dict[int, Any] = {}

    def process(number: int) -> None:
        def slow(request: SampleRequest, _: int) -> ScriptedReply:
            row = int(ByteChat.text(request.ids).split("question ")[1][:2])
            return ScriptedReply(ByteChat.say("an answer"), delay_s=0.2 * (row in {number, number + 4}))

        at = [0]
        options: dict[str, Any] = {"staleness": 1, "replaces": replaces}
        left = {"step": lambda: at[0], "left": lambda: steps - at[0]}
        order = RowOrder(32, lambda epoch: range(32))
        for step in range(steps):
            at[0] = step
            if step in (0, 2):
                engine = ScriptedEngine(slow)
                batches = batches_of(
                    number, n, meeting, engine, lambda row: row not in dead, order=order, training=left, **options
                )
                assert batches.groups is not None
            rows = [one.row["number"] for one in batches.take([{}] * 8).scored]
            trained[number, step] = rows[::4]
            assert rows == [row for row in rows[::4] for _ in range(4)]
            if step in (1, 3):
                batches.stop()
        states[number] = order.state()

    in_threads(n, process)
    assert len(trained) == n * steps and states[0] == states[1]
    assert meeting.met == dict.fromkeys(range(n), steps if replaces else 2 * steps), "after rollouts, and after rewards"
    found = sorted(row for rows in trained.values() for row in rows)
    live = [row for row in range(32) if not replaces or row not in dead]
    assert found == live[: n * steps * 2], "every row once, in whichever process"


def test_a_process_that_fails_stops_the_others_with_a_checkpoint() -> None:
    meeting = Meeting(2)
    saved: list[int] = []
    said: dict[int, Exception] = {}

    def process(number: int) -> None:
        def answers(request: SampleRequest, _: int) -> list[int]:
            if number:
                raise AssertionError("a bug of the engine")
            return ByteChat.say("an answer")

        training = {"step": lambda: 3, "save": lambda: saved.append(number)}
        batches = batches_of(
            number, 2, meeting, ScriptedEngine(answers), lambda row: True, staleness=1, training=training
        )
        try:
            batches.take([{}] * 4)
        except Exception as error:
            said[number] = error

    in_threads(2, process)
    assert isinstance(said[0], PeerError) and "process 1 failed first" in str(said[0])
    assert isinstance(said[1], AssertionError) and sorted(saved) == [0, 1]


def batches_of(
    number: int,
    n: int,
    meeting: Meeting,
    engine: ScriptedEngine,
    live: Callable[[int], bool],
    *,
    order: RowOrder | None = None,
    training: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Batches:
    """The batches of one of `n` processes, in groups of four, over rows that are `live` or not."""
    data = [{"prompt": f"question {row:02}", "number": row} for row in range(50)]
    rollouts = scripted_rollouts(engine)
    processes = Processes(n, number, partial(meeting.gather, number), partial(meeting.meet, number))
    known: dict[str, Any] = {
        "step": lambda: 0,
        "left": lambda: 9,
        "weights": lambda: iter(()),
        "load_weights": lambda: 0,
        "save": lambda: None,
        "log": lambda metrics: None,
        **training,
    }
    groups = StepGroups(
        rollouts,
        order or RowOrder(50, lambda epoch: range(50)),
        data.__getitem__,
        QueueRule(sampling=SamplingOptions(), group_size=4, most_groups=4.0, **options),
        Training(**known),
        processes,
    )

    def reward(number: list[int], **_: Any) -> list[float]:
        return [float(place % 2) if live(row) else 1.0 for place, row in enumerate(number)]

    grading = Grading([reward], [1.0], lambda scored: bool(scored.total), ["r"])
    return Batches(lambda rows: rollouts.run(rows, SamplingOptions()), grading, Shaping(), processes, groups)


def in_threads(n: int, process: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=process, args=(number,)) for number in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
