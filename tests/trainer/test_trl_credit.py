"""Advantages by turn in TRL's batches: which token gets what, in every loss, with every way a batch is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trainings import CREDIT_BY_TURN, STAGES, STILL, LossInputs, by_length, run_to_end
from toolgrpo.engines.base import SampleRequest
from toolgrpo.errors import ConfigError, RewardError
from toolgrpo.learning.stages import LOSSES_BY_TOKEN, ROW_LOSSES, TOKEN_LOSSES
from toolgrpo.observe.records import read_episodes
from toolgrpo.testing import ByteChat, ScriptedTools, tiny_trainer

pytestmark = pytest.mark.contract

LONGEST = 160  # tokens after the prompt
TURNS: dict[str, Any] = {**STILL, **CREDIT_BY_TURN, "max_completion_length": LONGEST, "max_steps": 1}


def script(request: SampleRequest, number: int) -> list[int]:
    """Episodes of one to three turns; some of their calls are of a tool that is not there."""
    turns = request.ids.count(ByteChat.end)
    if turns < 4 and (number + sum(request.ids)) % 3:
        return ByteChat.say('call look {"at": 1}' if number % 4 else 'call nothing {"at": 2}')
    return ByteChat.say("abcdefg"[: 1 + number % 7])


class Seen(LossInputs):
    """Keeps the log-probabilities of each micro-batch too, and the whole batches that they were cut from."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batches: list[dict[str, Any]] = []
        self.logps: list[torch.Tensor] = []

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.batches.append(super()._generate_and_score_completions(inputs))
        return self.batches[-1]

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        scored = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if torch.is_grad_enabled():
            self.logps.append(scored[0].detach().clone())
        return scored


def trained(folder: Path, reward: Any = by_length, **changes: Any) -> Seen:
    parts = {"tools": ScriptedTools({"look": lambda at: f"r{at}"})}
    run: Seen = run_to_end(tiny_trainer(folder, reward, script, kind=Seen, parts=parts, **{**TURNS, **changes}))
    return run


def by_hand(run: Seen, inputs: dict[str, Any], logps: torch.Tensor) -> torch.Tensor:
    """The loss of a micro-batch, token by token, at a ratio of 1: only the advantage and the counting are left."""
    mask = inputs["completion_mask"] * inputs["tool_mask"]
    advantages = inputs["advantages"]
    gain = advantages * inputs.get("importance_sampling_ratio", 1.0)
    kind, rows = run.loss_type, len(mask)
    if kind == "cispo":
        gain = gain * logps * min(1.0, run.epsilon_high)
    if kind == "sapo":  # sigmoid(0) * 4 / temperature: 2 over the temperature of the token's own sign
        over = torch.where(advantages > 0, run.args.sapo_temperature_pos, run.args.sapo_temperature_neg)
        gain = gain * 2 / over
    of_rows = (gain * mask).sum(dim=1)
    micro_batches = run.args.gradient_accumulation_steps
    if kind in ("grpo", "sapo"):
        return -(of_rows / mask.sum(dim=1).clamp(min=1)).mean() / micro_batches
    if kind == "bnpo":
        return -of_rows.sum() / mask.sum() / micro_batches
    if kind == "dr_grpo":
        return -of_rows.sum() / (rows * LONGEST) / micro_batches
    if kind == "luspo":
        return -of_rows.mean() / micro_batches
    return -of_rows.sum() / (inputs["num_items_in_batch"] * micro_batches / run.args.steps_per_generation)


@pytest.mark.e2e
@pytest.mark.parametrize("loss_type", LOSSES_BY_TOKEN)
def test_each_loss_weighs_each_token_by_its_turns_advantage(tmp_path: Path, loss_type: str) -> None:
    run = trained(tmp_path, loss_type=loss_type, gradient_accumulation_steps=2, per_device_train_batch_size=4)
    assert len(run.losses) == 2
    for inputs, loss, logps in zip(run.seen, run.losses, run.logps, strict=True):
        assert inputs["advantages"].dim() == 2
        assert loss == pytest.approx(float(by_hand(run, inputs, logps)), abs=1e-6, rel=1e-4)
    apart = [len(set(row.tolist()) - {0.0}) for inputs in run.seen for row in inputs["advantages"]]
    assert max(apart) > 1, "turns of one episode are weighed differently"


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loss_type": "vespo"}, "vespo takes one for each episode"),
        ({"importance_sampling_level": "sequence"}, "sequence has one ratio for all tokens"),
        ({"off_policy_mask_threshold": 0.5}, "leave it out"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "rewards by turn are added"),
        ({"multi_objective_aggregation": "normalize_then_sum", "stage_fn": [f"{STAGES}/overlong.py"]}, "makes none"),
    ],
)
def test_a_stage_that_does_not_go_with_the_loss_ends_the_run(tmp_path: Path, changes: Any, said: str) -> None:
    with pytest.raises((ConfigError, RewardError), match=said):
        trained(tmp_path, **changes)


def test_every_loss_but_one_is_by_token() -> None:
    assert set(LOSSES_BY_TOKEN) | {"vespo"} == TOKEN_LOSSES | ROW_LOSSES | {"bnpo"}


@pytest.mark.e2e
def test_with_a_stage_that_does_nothing_the_batch_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "same.py").write_text("def stage(batch, facts):\n    return batch\n")
    today = trained(tmp_path / "today", stage_fn=None)
    turns = trained(tmp_path / "turns", stage_fn=[str(tmp_path / "same.py")])
    assert today.batches[0].keys() == turns.batches[0].keys()
    for name, value in today.batches[0].items():
        assert torch.equal(value, turns.batches[0][name]), name
    assert today.losses == turns.losses


@pytest.mark.e2e
def test_a_group_whose_outcomes_are_alike_teaches_by_its_turns_and_is_read(tmp_path: Path) -> None:
    def alike(completions: list[Any], **_: Any) -> list[float]:
        return [1.0] * len(completions)

    run = trained(tmp_path, alike)
    log = run.state.log_history[0]
    assert log["reward/groups_without_spread"] == 1.0 and log["credit/groups_revived"] > 0
    assert log["signal/rows_skipped"] < 1.0 and log["grad_norm"] > 0


@pytest.mark.e2e
def test_what_is_recorded_is_what_is_trained_on(tmp_path: Path) -> None:
    run = trained(tmp_path)
    rows = {tuple(record["ids"]): record for record in read_episodes(tmp_path)}
    (batch,) = run.batches
    seen = 0
    of_rows = (batch[name] for name in ("completion_ids", "completion_mask", "advantages"))
    for ids, mask, advantages in zip(*of_rows, strict=True):
        record = rows[tuple(ids[mask.bool()].tolist())]
        assert len(record["turn_rewards"]) == len(record["turn_advantages"]) == len(record["turns"])
        for turn, value in zip(record["turns"], record["turn_advantages"], strict=True):
            seen += 1
            of_turn = advantages[turn["start"] : turn["end"]]
            torch.testing.assert_close(of_turn, torch.full_like(of_turn, value), rtol=0, atol=1e-6)
    assert seen > len(rows)
    log = run.state.log_history[0]
    assert log["credit/spread_within_episode"] > 0 and "credit/turn_1/mean" in log
