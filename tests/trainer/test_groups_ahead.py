"""Groups ahead of training in several processes, which are threads here: the rows they share, and where they meet."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.meeting import Meeting
from toolgrpo.engines.base import SampleRequest, SamplingOptions
from toolgrpo.errors import EngineError, PeerError
from toolgrpo.rollout import EpisodeLimits, Rollouts
from toolgrpo.signal.admission import Admission
from toolgrpo.signal.row_order import RowOrder
from toolgrpo.signal.shaping import Shaping
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedReply
from toolgrpo.trainer.drawn_batches import Asked, DrawnBatches, RewardRule
from toolgrpo.trainer.groups_ahead import GroupsAhead, Lookahead
from toolgrpo.trainer.overlap import Exchange, RunAhead

PATIENCE_S = 30.0
ROWS = [{"prompt": f"q{number:02}", "number": number} for number in range(32)]
DEAD = {1, 3, 4, 9}


def slow_for(rows: set[int]) -> Any:
    """A script whose questions of some rows take a while."""

    def script(request: SampleRequest, number: int) -> ScriptedReply:
        text = ByteChat.text(request.ids)
        return ScriptedReply(ByteChat.say("an answer"), delay_s=0.2 * (int(text[text.index("q") + 1 :][:2]) in rows))

    return script


@pytest.mark.parametrize("backfill", [False, True])
def test_processes_share_the_rows_and_meet_only_when_a_step_is_taken(backfill: bool) -> None:
    """Two processes of two groups a step, each with slow groups of its own; after two steps both begin anew."""
    n, steps, meeting = 2, 4, Meeting(2)
    trained: dict[tuple[int, int], list[int]] = {}
    states: dict[int, Any] = {}

    def process(number: int) -> None:
        order = RowOrder(32, lambda epoch: range(32))
        gather = partial(meeting.gather, number)
        at = [0]

        async def ask(rows: Any, trajectories: Any) -> Asked:
            live = rows[0]["number"] not in DEAD
            return Asked(tuple((float(place % 2) if live else 1.0,) for place, _ in enumerate(trajectories)))

        def stream() -> GroupsAhead:
            run = RunAhead(
                rollouts=Rollouts(
                    engine=ScriptedEngine(slow_for({number, number + 4})),
                    chat=ByteChat(),
                    limits=EpisodeLimits(max_completion_length=50),
                    tokenizer=ByteChat(),
                ),
                order=order,
                row_of=ROWS.__getitem__,
                handover="keep",
                sampling=SamplingOptions(),
                group_size=4,
                process=number,
                n_processes=n,
                trained=torch.nn.Linear(1, 1),
                weights=lambda: iter(()),
                step=lambda: at[0],
                left=lambda: steps - at[0],
                exchange=Exchange(lambda: at[0], lambda: None, gather),
                log=lambda metrics: None,
            )
            return GroupsAhead(run, Lookahead(1, 0.5))

        ahead = stream()
        for step in range(steps):
            at[0] = step
            if step == 2:
                ahead.stop()
                ahead = stream()
            if backfill:
                rule = RewardRule(("r",), (1.0,), lambda scored: bool(scored.total), Shaping())
                drawing = DrawnBatches(
                    admission=partial(Admission.of, max_groups_drawn=4.0),
                    order=order,
                    rule=rule,
                    row_of=ROWS.__getitem__,
                    group_size=4,
                )
                drawing = replace(drawing, n_processes=n, process=number, gather=gather, ahead=ahead)
                rollouts = ahead._line._rollouts
                batch = drawing.draw(rollouts, SamplingOptions(), ask, n_rows=8, step=step, first_number=0)
                rows = [row["number"] for row in batch.rows]
            else:
                rows = [one.row["number"] for one in ahead.take(8).episodes]
            trained[number, step] = rows[::4]
            assert rows == [row for row in rows[::4] for _ in range(4)]
        ahead.stop()
        states[number] = order.state()

    threads = [threading.Thread(target=process, args=(number,)) for number in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    assert len(trained) == n * steps and states[0] == states[1]
    found = sorted(row for rows in trained.values() for row in rows)
    live = [row for row in range(32) if not backfill or row not in DEAD]
    assert found == live[: n * steps * 2], "every row once, in whichever process"


def test_a_process_that_fails_stops_the_others_with_a_checkpoint() -> None:
    meeting = Meeting(2, PATIENCE_S)
    saved: list[int] = []
    said: dict[int, Exception] = {}

    def process(number: int) -> None:
        def take() -> int:
            if number:
                raise EngineError("the engine is gone")
            return 1

        try:
            Exchange(lambda: 3, lambda: saved.append(number), partial(meeting.gather, number)).all_or_none(
                take, lambda: None
            )
        except Exception as error:
            said[number] = error

    threads = [threading.Thread(target=process, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert isinstance(said[0], PeerError) and "process 1 failed first" in str(said[0])
    assert isinstance(said[1], EngineError) and sorted(saved) == [0, 1]
