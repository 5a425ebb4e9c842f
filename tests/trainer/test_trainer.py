"""The trainer on a scripted engine: what reaches TRL is exactly what the ledgers hold."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_utils

from tests.support.trainings import LossInputs, by_length, call_and_answer
from toolgrpo.engines.base import SampleRequest
from toolgrpo.episode.trajectory import Trajectory
from toolgrpo.errors import ChatFormatError, ConfigError, DataError, EngineError, RewardError
from toolgrpo.testing import ByteChat, ScriptedTools, numbered_tokenizer, tiny_config, tiny_qwen3, tiny_trainer
from toolgrpo.tools import load_tools


def rows(n: int = 8) -> Dataset:
    return Dataset.from_list([{"prompt": f"q{i}", "answer": str(i)} for i in range(n)])


def make(folder: Path, reward: Callable[..., Any], script: Any = call_and_answer, **changes: Any) -> Any:
    parts = {"eval_dataset": rows(4), "tools": ScriptedTools({"add": lambda a, b: str(a + b)})}
    return tiny_trainer(folder, reward, script, kind=LossInputs, parts=parts, learning_rate=1e-3, **changes)


def test_the_loss_sees_ids_mask_and_logprobs_of_the_ledgers(tmp_path: Path) -> None:
    kept: list[Trajectory] = []

    def reward(completions: list[Any], trajectories: list[Trajectory], **_: Any) -> list[float]:
        kept.extend(trajectories)
        return by_length(completions)

    trainer = make(tmp_path, reward, max_steps=1)
    trainer.train()
    (inputs,) = trainer.seen
    ledgers = {t.prompt_ids + t.ids: t for t in kept}
    assert len(kept) == 8
    for i in range(8):
        real = inputs["completion_mask"][i].bool()
        prompt = tuple(inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()].tolist())
        ledger = ledgers[prompt + tuple(inputs["completion_ids"][i][real].tolist())]
        assert tuple(inputs["tool_mask"][i][real].tolist()) == ledger.mask
        assert 0 < sum(ledger.mask) < len(ledger.mask)
        expected = [0.0 if lp is None else lp for lp in ledger.logprobs]
        assert inputs["sampling_per_token_logps"][i][real].tolist() == pytest.approx(expected)
        assert prompt == ledger.prompt_ids


def test_rewards_see_tool_messages_and_columns_weights_are_pushed_once_a_step_and_so_is_evaluated(
    tmp_path: Path,
) -> None:
    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        assert len(answer) in (8, 16)
        for completion in completions:
            assert [m["role"] for m in completion] == ["assistant", "tool", "assistant"]
            assert completion[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
            assert completion[1] == {"role": "tool", "name": "add", "content": "3"}
        return by_length(completions)

    trainer = make(tmp_path, reward, gradient_accumulation_steps=2, per_device_eval_batch_size=8)
    trainer.train()
    assert trainer.state.global_step == trainer.engine.weight_loads == 2
    assert trainer.engine.open_requests == 0 and not trainer.engine.is_open
    logs = trainer.state.log_history[0]
    assert logs["rollout/turns"] == 2 and logs["tools/call_frequency"] == 1 and logs["stop/finished"] == 1
    assert logs["tools/add/calls"] == 16
    metrics = trainer.evaluate()
    assert metrics["eval_rollout/turns"] == 2 and "eval_reward" in trainer.state.log_history[-1]
    with pytest.raises(ConfigError, match="an evaluation has none here"):
        trainer.prediction_step(trainer.model, {}, prediction_loss_only=True)


def test_a_reward_that_hangs_stops_training_with_an_error(tmp_path: Path) -> None:
    """Those that exit, and those that are async: `test_reward_running.py`."""

    def hangs(completions: list[Any], **_: Any) -> Any:
        threading.Event().wait()

    with pytest.raises(RewardError, match=r"reward hangs .*0.3 s"):
        make(tmp_path, hangs, reward_timeout=0.3).train()


class WithoutUsers(ByteChat):
    """A format of somebody's own that knows no user in the middle."""

    def bridge(self, ids: Any, tool_messages: Any, **asked: Any) -> list[int]:
        raise ChatFormatError("no users here")


def test_a_format_that_refuses_users_is_asked_before_the_first_step(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "user_turns": ["more"] if i % 2 else None} for i in range(8)]
    with pytest.raises(ChatFormatError, match="no users here"):
        tiny_trainer(tmp_path, by_length, call_and_answer, rows=rows, chat=WithoutUsers())


def test_too_few_rows_for_a_step_are_an_error_and_no_empty_training(tmp_path: Path) -> None:
    few = [{"prompt": "q0", "answer": "0"}]
    with pytest.raises(DataError, match="the training set has 1 row, but one step needs 2 different prompts"):
        tiny_trainer(tmp_path, by_length, call_and_answer, rows=few)


def test_a_lost_episode_stops_training_and_is_no_reward(tmp_path: Path) -> None:
    seen: list[int] = []

    def reward(completions: list[Any], **_: Any) -> list[float]:
        seen.append(len(completions))
        return by_length(completions)

    def script(request: SampleRequest, number: int) -> Any:
        return EngineError("the server is gone") if number >= 16 else call_and_answer(request, number)

    trainer = make(tmp_path, reward, script)
    with pytest.raises(EngineError, match="the server is gone"):
        trainer.train()
    assert seen == [8] and trainer.state.global_step == 1


@pytest.mark.parametrize("head", ["as it comes", "tuned"])
def test_single_turns_without_tools_give_trls_own_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    """TRL's own trainer, given the same tokens and log-probabilities through its `rollout_func`, step by step.

    Bit for bit where its fused head is tuned as ours (`trl/trainer.tune_fused_head`), and to rounding as TRL comes.
    """

    def script(request: SampleRequest, number: int) -> list[int]:
        return ByteChat.say("abcdefgh"[number % 7 :] + "z" * (number % 3))

    def by_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(len(ids) % 4) for ids in completion_ids]

    changes: dict[str, Any] = {"learning_rate": 1e-3, "max_steps": 4}
    # A shared prefix is equal to rounding only; without dead rows the entropy would not be that of every row.
    ours = tiny_trainer(tmp_path / "ours", by_ids, script, prefix_sharing="off", skip_dead_rows="off", **changes)
    trajectories: list[Trajectory] = []
    plain_rollout = ours.rollout_batches._run

    def keep(*args: Any, **kwargs: Any) -> Any:
        result = plain_rollout(*args, **kwargs)
        trajectories.extend(result.trajectories)
        return result

    ours.rollout_batches._run = keep
    ours.train()
    replay = iter(trajectories)

    def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        batch = [next(replay) for _ in prompts]
        return {
            "prompt_ids": [list(t.prompt_ids) for t in batch],
            "completion_ids": [list(t.ids) for t in batch],
            "logprobs": [list(t.logprobs) for t in batch],
        }

    asked = tiny_config(tmp_path / "theirs", **changes).to_dict()
    known = {key: value for key, value in asked.items() if key in GRPOConfig.__dataclass_fields__}
    if head == "as it comes":
        monkeypatch.setattr(chunked_logprob, "TOKEN_CHUNK_SIZE", 4096)
        monkeypatch.setattr(trl_utils, "_use_triton", chunked_logprob._use_triton)
    theirs = GRPOTrainer(
        tiny_qwen3(0),
        by_ids,
        GRPOConfig(**{**known, "generation_batch_size": None}),
        train_dataset=rows(),
        processing_class=numbered_tokenizer(),
        rollout_func=rollout_func,
    )
    theirs.use_vllm = True  # correct for the engine's log-probabilities, as ours does
    theirs.vllm_generation = type("NoEngine", (), {"sync_weights": staticmethod(lambda: None)})()
    theirs._last_loaded_step = -1
    theirs.train()
    for mine, his in zip(ours.state.log_history[:4], theirs.state.log_history[:4], strict=True):
        for key in ("loss", "grad_norm", "reward", "entropy"):
            assert mine[key] == pytest.approx(his[key], abs=1e-6 if head == "as it comes" else 0), key
        assert mine["grad_norm"] > 0, "a comparison of zeros would show nothing"
    for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(a, b) or (head == "as it comes" and torch.allclose(a, b, atol=1e-6))


def test_a_toolbox_with_another_timeout_than_the_config_is_refused(tmp_path: Path) -> None:
    tools = Path(__file__).parents[2] / "tools_funcs" / "arithmetic_tools.py"
    says = "tool_timeout is 9, but the toolbox that was given was loaded with 7 s"
    with load_tools(str(tools), tool_timeout_s=7.0) as toolbox, pytest.raises(ConfigError, match=says):
        tiny_trainer(tmp_path, by_length, None, model="not looked at", parts={"tools": toolbox}, tool_timeout=9.0)
