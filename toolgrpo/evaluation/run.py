"""Measure a model: some episodes of each question, graded, and made into a report.

No trainer is in it.

The episodes are those of training: same loop, engine, tools, limits and rewards. Several processes
share the questions; each has the whole model, however the launcher would have spread it for a
training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from toolgrpo.data.rows import row_key
from toolgrpo.engines.adapters import own_weights
from toolgrpo.engines.base import SamplingOptions
from toolgrpo.engines.policy import Backend, Policy, compute_dtype
from toolgrpo.episode.tool_calls import Call
from toolgrpo.episode.trajectory import copies_result
from toolgrpo.evaluation.grading import Grader, grade
from toolgrpo.evaluation.measures import given_answer
from toolgrpo.evaluation.report import EpisodeFacts, ModelReport
from toolgrpo.observe.metrics import cut_in_turn
from toolgrpo.rollout import EpisodeLimits, Rollouts, Scored
from toolgrpo.rollout.batch import Row
from toolgrpo.rollout.row_parts import named_tools
from toolgrpo.support.barrier import wait_for_the_slowest
from toolgrpo.support.process_setup import give_memory_back


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The settings of a measurement, independent of the model."""

    rows: Sequence[Row]
    rewards: Sequence[Grader]
    weights: Sequence[float] | None  # of the rewards; None: 1 each
    threshold: float  # the reward of a success, where the row brings no measure
    options: SamplingOptions
    samples: int  # episodes per question
    ks: tuple[int, ...]  # of pass@k and maj@k


def policy_of_model(
    model: Any,
    state: PartialState,
    *,
    mixed_precision: str = "no",
    weights: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None = None,
) -> Policy:
    """Return the policy of a model that is not trained and is whole in each process.

    Its weights are its own, or come from elsewhere (and it has none).
    """
    return Policy(
        get_model=lambda: model,
        weights=weights or (lambda: own_weights(model)),
        dtype=compute_dtype(model, mixed_precision),
        device=state.device,
        backend=Backend(kind=state.distributed_type.value, n_processes=state.num_processes),
        process_index=state.process_index,
        wait_for_everyone=state.wait_for_everyone,
    )


def evaluate(
    evaluation: Evaluation,
    rollouts: Rollouts,
    policy: Policy | None,
    *,
    name: str,
    label: str = "episodes",
) -> ModelReport:
    """Run and grade the episodes of all questions, in all processes,
    and return what was found, in each of them. A model behind an endpoint has no `policy`.
    """
    started, state = time.monotonic(), PartialState()
    # 1. the questions of this process
    processes = (state.process_index, state.num_processes)
    first, step = processes if policy is None else (policy.process_index, policy.backend.n_processes)
    own = range(first, len(evaluation.rows), step)
    asked = [evaluation.rows[question] for question in own for _ in range(evaluation.samples)]
    # 2. their episodes
    wait_for_the_slowest()  # so that they know each other before anybody is slow
    if policy is not None:
        rollouts.engine.load_weights(policy.weights())
    give_memory_back()  # what the start and the weights' way have left
    batch = rollouts.run(asked, evaluation.options, mode="eval", label=label, group_size=evaluation.samples)
    # 3. what they are worth
    before = sum(len(range(lower, len(evaluation.rows), step)) for lower in range(first))  # of lower processes
    batch = batch.numbered(evaluation.samples * before)
    batch = grade(batch, evaluation.rewards, evaluation.weights, threshold=evaluation.threshold)
    rollouts.observers.batch_done(batch)
    # 4. those of all processes
    facts = [
        _facts(question, episode, rollouts.limits)
        for question, group in zip(own, batch.groups(), strict=True)
        for episode in group
    ]
    wait_for_the_slowest()
    gathered: list[EpisodeFacts] = gather_object(facts)
    return ModelReport(
        model=name,
        episodes=tuple(sorted(gathered, key=lambda fact: fact.question)),
        samples=evaluation.samples,
        ks=evaluation.ks,
        seconds=time.monotonic() - started,
        keys=tuple(row_key(row["prompt"]) for row in evaluation.rows),
    )


def _facts(question: int, episode: Scored, limits: EpisodeLimits) -> EpisodeFacts:
    trajectory = episode.trajectory
    return EpisodeFacts(
        question=question,
        task=None if episode.row.get("task") is None else str(episode.row["task"]),
        reward=episode.total,
        success=episode.success,
        drop=episode.drop,
        answer=given_answer(trajectory.messages),
        turns=len(trajectory.turns),
        sampled_tokens=trajectory.n_sampled,
        stop_reason=trajectory.stop_reason.value,
        repeats=_repeats(trajectory.calls),
        copies=copies_result(trajectory.messages),
        cut_in_turn=cut_in_turn(trajectory, limits),
        usage=trajectory.metadata.get("usage", {}),
        tools=named_tools(episode.row),
        # without their texts, which no statistic wants: processes send these to each other
        calls=tuple(replace(call, arguments={}, result="") for call in trajectory.calls if call.result is not None),
    )


def _repeats(calls: Sequence[Call]) -> bool:
    """Return whether one of the calls was made before, and well."""
    made: list[tuple[str | None, Mapping[str, Any]]] = []
    for call in calls:
        if (call.name, call.arguments) in made:
            return True
        if call.ok:
            made.append((call.name, call.arguments))
    return False
