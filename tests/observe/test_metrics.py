"""Metrics of a batch, and those of several processes as one."""

from __future__ import annotations

import json

import pytest

from toolgrpo.engines.base import CacheRoom
from toolgrpo.episode.token_ledger import Ledger
from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt, ToolErrorKind, ToolResult
from toolgrpo.episode.trajectory import StopReason, Trajectory, Turn, copies_result, is_void, is_void_record
from toolgrpo.observe.doctor import findings
from toolgrpo.observe.metrics import (
    EACH_TOOL,
    Known,
    Metric,
    MetricsLog,
    batch_metrics,
    groups_without_spread,
    merged,
    rollout_metrics,
    tool_metrics,
)
from toolgrpo.report.episode_data import COPIED, VOID, flags_of
from toolgrpo.rollout import EpisodeLimits
from toolgrpo.rollout.batch import Grade, RolloutBatch, RolloutTimes, Scored
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedTools
from toolgrpo.testing.engine import run_episode


def trajectory(sampled: int, context: int, results: tuple[ToolResult, ...], reason: StopReason) -> Trajectory:
    ledger = Ledger([1, 2, 3])
    ledger.sampled([5] * sampled, [-1.0] * sampled)
    ledger.context([6] * context)
    ledger.turn(Turn(start=0, end=sampled, content="", reasoning=None, results=results))
    return ledger.finish(reason)


def batch(*trajectories: Trajectory, totals: tuple[float, ...] = (), group_size: int = 1) -> RolloutBatch:
    made = RolloutBatch(
        episodes=tuple(Scored({"prompt": "q"}, one) for one in trajectories),
        times=RolloutTimes(4.0, 1.0),
        group_size=group_size,
    )
    return made.graded([Grade({}, total) for total in totals], lambda one: one.total == 1.0) if totals else made


GOOD = ToolResult("3", "add", duration_s=0.5, cached=True)
BAD = ToolResult("?", "add", ToolErrorKind.TIMEOUT, duration_s=2.0, left_out=7)
ODD = ToolResult("?", None, ToolErrorKind.INVALID_JSON)


def test_rollout_metrics_count_what_is_in_the_trajectories() -> None:
    both = batch(trajectory(4, 2, (GOOD, BAD), StopReason.FINISHED), trajectory(8, 0, (ODD,), StopReason.LENGTH))
    found = merged([rollout_metrics(both)])
    expected = {
        **{"completions/mean_length": 6, "completions/clipped_ratio": 0.5, "rollout/engine_idle_share": 0.25},
        **{"rollout/sampled_tokens": 12, "rollout/context_tokens": 2, "sampling/surprise": 1.0},  # nats a sampled token
        **{"stop/finished": 0.5, "stop/length": 0.5, "stop/deadline": 0},
        **{"tools/call_frequency": 1.5, "tools/failure_frequency": 2 / 3, "tools/truncated": 1, "tools/cached": 1},
        **{"tools/add/calls": 2, "tools/add/failures": 1, "tools/unnamed/failures": 1},
        **{"tools/error/timeout": 1, "tools/error/invalid_json": 1},
        **{"tools/latency_p50": 0.5, "tools/latency_p95": 2.0},
    }
    assert {name: found[name] for name in expected} == expected


def test_names_that_a_model_makes_up_are_one_tool_that_there_is_not() -> None:
    made_up = [ToolResult("?", name, ToolErrorKind.UNKNOWN_TOOL) for name in ("plus", "sum", "plus")]
    metrics = tool_metrics([trajectory(1, 0, (GOOD, *made_up), StopReason.FINISHED)])
    named = {name.split("/")[1] for name in metrics if name.endswith(("/calls", "/failures"))}
    assert named == {"add", "unknown"} and metrics["tools/unknown/failures"].value == 3


def metrics_of_catalogue(n_tools: int, *results: ToolResult) -> dict[str, float]:
    """Return the metrics of an episode with these results, to which so many tools were offered."""
    tools = [f"tool{number}" for number in range(n_tools)]
    known = Known(tools, EpisodeLimits(max_completion_length=9))
    return merged([rollout_metrics(batch(trajectory(1, 0, results, StopReason.FINISHED)), known)])


def test_the_demand_on_the_cache_is_logged_where_its_size_is_known() -> None:
    room = CacheRoom(tokens=23_808, window=2304, at_a_time=200)
    assert str(room) == "23,808 tokens, 10 full episodes of 2,304; 200 asked for"
    known = Known([], EpisodeLimits(max_completion_length=9), room)
    own = batch(trajectory(1, 0, (), StopReason.FINISHED))
    assert rollout_metrics(own, known)["engine/cache_demand"].value == pytest.approx(200 * 1152 / 23_808)
    assert "engine/cache_demand" not in rollout_metrics(own)


CALLED = ToolResult("3", "tool0")


@pytest.mark.parametrize(
    ("n_tools", "expected"),
    [
        (EACH_TOOL, {"tool0": 1, **{f"tool{n}": 0 for n in range(1, EACH_TOOL)}}),
        (400, {"tool0": 1, "unknown": 0}),
    ],
)
def test_each_of_a_few_tools_has_metrics_and_of_a_catalogue_those_called(
    n_tools: int, expected: dict[str, int]
) -> None:
    found = metrics_of_catalogue(n_tools, CALLED)
    calls = {name: value for name, value in found.items() if name.startswith("tools/") and name.endswith("/calls")}
    assert calls == {f"tools/{name}/calls": count for name, count in expected.items()}


def test_a_tool_that_no_row_offers_has_no_metrics() -> None:
    rows = [{"prompt": "q", "tools": ["tool0"]}, {"prompt": "q", "tools": ["tool0"], "hidden_tools": ["tool1"]}]
    drawn = RolloutBatch(episodes=tuple(Scored(row, trajectory(1, 0, (), StopReason.FINISHED)) for row in rows))
    known = Known(["tool0", "tool1", "tool2"], EpisodeLimits(max_completion_length=9))
    names = {name for name in rollout_metrics(drawn, known) if name.startswith("tools/") and name.endswith("/calls")}
    assert names == {"tools/tool0/calls", "tools/tool1/calls"}


@pytest.mark.parametrize(("n_calls", "told"), [(0, {"no_tool_calls"}), (60, set())])
def test_the_doctor_sees_a_catalogue_that_is_not_called_and_does_not_list_it(n_calls: int, told: set[str]) -> None:
    logs = [{**metrics_of_catalogue(400, *[CALLED] * n_calls), "step": step, "reward": 0.5} for step in range(1, 21)]
    assert {one.rule for one in findings(logs)} & {"no_tool_calls", "tool_never_used"} == told


def test_counts_are_added_bounds_are_the_extremes_and_shares_are_averaged() -> None:
    one = batch_metrics(batch(*[trajectory(4, 0, (GOOD,), StopReason.FINISHED)] * 2, totals=(1.0, 0.0)))
    others = trajectory(2, 4, (GOOD, BAD), StopReason.FINISHED), trajectory(6, 0, (), StopReason.LENGTH)
    found = merged([one, batch_metrics(batch(*others, totals=(-1, 3)))])
    expected = {
        **{"rollout/sampled_tokens": 16.0, "rollout/context_tokens": 4.0, "rollout/seconds": 4.0},
        **{"completions/mean_length": 4.0, "completions/min_length": 2.0, "completions/max_length": 6.0},
        **{"completions/clipped_ratio": 0.25, "success": 0.25, "reward/min": -1.0, "reward/max": 3.0},
        **{"tools/add/calls": 4.0, "tools/add/failures": 1.0, "tools/error/timeout": 1.0, "tools/truncated": 1.0},
        "tools/call_frequency": 1.0,
    }
    assert {name: found[name] for name in expected} == expected
    assert merged([{"a": Metric(1.0)}, {}]) == {"a": 1.0}, "averaged over those that have it"


def test_a_share_weighs_as_much_as_it_has_things_behind_it() -> None:
    one = trajectory(4, 0, (BAD,), StopReason.LENGTH)
    others = [trajectory(2, 0, (GOOD, GOOD, GOOD), StopReason.FINISHED)] * 3
    parts = [batch_metrics(batch(one, totals=(0,))), batch_metrics(batch(*others, totals=(1, 1, 1)))]
    found, whole = merged(parts), merged([batch_metrics(batch(one, *others, totals=(0, 1, 1, 1)))])
    assert whole["success"] == 0.75 and whole["tools/failure_frequency"] == 0.1
    near = {"tools/latency_p50", "tools/latency_p95"}
    assert {name: found[name] for name in whole if name not in near} == pytest.approx(
        {name: whole[name] for name in whole if name not in near}
    )


def test_groups_without_spread_are_counted_and_rounding_is_none() -> None:
    rewards = [*(1.2, 1.2 + 1e-7, 1.2 - 1e-7, 1.2), *(1.2, 1.21, 1.2, 1.2), *[-2.0] * 4]
    assert groups_without_spread(rewards, group_size=4) == pytest.approx(2 / 3)


def test_what_is_trained_on_is_logged_and_held_out_questions_are_not() -> None:
    logged: list[dict[str, float]] = []
    log = MetricsLog(lambda metrics: logged.append(dict(metrics)))
    one = trajectory(4, 0, (), StopReason.FINISHED)
    log.batch_done(batch(one, one, totals=(1.0, 0.0), group_size=2))
    log.batch_done(RolloutBatch(episodes=(Scored({}, one),), mode="heldout"))
    (metrics,) = logged
    assert (metrics["success"], metrics["reward/min"], metrics["reward/max"]) == (0.5, 0.0, 1.0)
    assert metrics["reward/groups_without_spread"] == 0.0 and metrics["rollout/turns"] == 1


# Void turns and copied results, as they are counted and flagged.


def called(*statuses: AttemptStatus) -> Turn:
    return Turn(0, 1, "so", None, tuple(CallAttempt(status, "raw", "add") for status in statuses))


@pytest.mark.parametrize(
    ("turn", "void"),
    [
        (Turn(0, 1, "the answer is 3", None), False),
        (Turn(0, 1, " \n", "some thought"), True),  # reasoning alone
        (Turn(0, 1, "the answer i", None, closed=False), True),  # cut without a call
        (called(AttemptStatus.UNKNOWN_TOOL), False),
        (called(AttemptStatus.INVALID_JSON), True),  # none can be read
        (called(AttemptStatus.INVALID_JSON, AttemptStatus.BAD_ARGUMENTS), False),
        (called(AttemptStatus.ACCEPTED), False),
        (called(AttemptStatus.UNMARKED), True),  # answered, and not run
    ],
)
def test_a_void_turn_has_neither_a_call_nor_an_answer(turn: Turn, void: bool) -> None:
    assert is_void(turn) is void


def episode(*texts: str) -> Trajectory:
    tools = ScriptedTools({"add": lambda a, b: str(a + b)})
    return run_episode(ScriptedEngine([ByteChat.say(text) for text in texts]), tools)


def test_an_episode_with_a_void_turn_is_flagged() -> None:
    whole = episode("call add {", 'call add {"a": 1, "b": 2}', "3")
    assert [is_void(turn) for turn in whole.turns] == [True, False, False]
    record = json.loads(json.dumps(whole.to_record()))
    assert [is_void_record(turn) for turn in record["turns"]] == [True, False, False] and flags_of(record) & VOID
    metrics = rollout_metrics(RolloutBatch(episodes=(Scored({}, whole),)))
    assert metrics["turns/void"].value == pytest.approx(1 / 3)
    assert not flags_of(episode("3").to_record()) & VOID


@pytest.mark.parametrize(
    ("answer", "copied"),
    [
        ("<tool_response>\n3\n</tool_response>", True),
        ("```json\n<tool_response>3", True),  # in a fence, cut
        ("<tool_response>\n4\n</tool_response>", False),  # another number
        ("The result is 3", False),
    ],
)
def test_a_copy_of_the_last_result_is_told_from_an_answer(answer: str, copied: bool) -> None:
    whole = episode('call add {"a": 1, "b": 2}', answer)
    assert copies_result(whole.messages) is copied and bool(flags_of(whole.to_record()) & COPIED) is copied
    batch = RolloutBatch(episodes=(Scored({}, whole),))
    assert rollout_metrics(batch)["answers/copied_result"].value == float(copied)
