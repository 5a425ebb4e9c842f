"""What `trainer/trl_seam.py` relies on in TRL. A failure here says what to look at after an upgrade."""

from __future__ import annotations

import inspect
import re

import pytest
import trl
from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from toolgrpo.trainer import trl_seam
from toolgrpo.trainer.trl_seam import GenerationOutput
from toolgrpo.trajectory import Ledger, StopReason


def source(function: object) -> str:
    return inspect.getsource(function)  # type: ignore[arg-type]


def test_the_installed_trl_is_a_tested_one() -> None:
    assert trl.__version__ in trl_seam.TESTED_VERSIONS, "add the version to TESTED_VERSIONS once all tests pass with it"


def test_generate_still_returns_the_same_eight_things() -> None:
    returned = re.findall(r"return (.+)$", source(GRPOTrainer._generate), re.M)[-1]
    expected = "prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images, tool_images"
    assert returned == expected, f"`_generate` now returns ({returned}); adapt GenerationOutput.as_trl"
    ledger = Ledger([1])
    ledger.sampled([2], [-1.0])
    output = GenerationOutput.from_trajectories([ledger.finish(StopReason.FINISHED)], pad_id=0).as_trl()
    assert len(output) == len(expected.split(", "))


def test_generate_is_given_the_prompts_only() -> None:
    assert list(inspect.signature(GRPOTrainer._generate).parameters) == ["self", "prompts"]
    assert list(inspect.signature(GRPOTrainer._generate_and_score_completions).parameters) == ["self", "inputs"]


def test_rewards_are_still_calculated_in_one_place() -> None:
    parameters = list(inspect.signature(GRPOTrainer._calculate_rewards).parameters)
    assert parameters == ["self", "inputs", "prompts", "completions", "completion_ids_list"]


def test_extra_fields_still_reach_the_reward_function() -> None:
    assert "extra_fields" in source(GRPOTrainer._generate_and_score_completions)


def test_importance_correction_still_hangs_on_use_vllm() -> None:
    text = source(GRPOTrainer._generate_and_score_completions)
    assert "self.use_vllm and self.vllm_importance_sampling_correction" in text, "see correct_for_engine"


def test_the_weight_walker_needs_nothing_we_do_not_give_it() -> None:
    used = set()
    for name in ("_iter_named_params", "_iter_fsdp_params", "_iter_fsdp1_params", "_iter_fsdp2_params"):
        used |= set(re.findall(r"self\.(\w+)", source(getattr(VLLMGeneration, name))))
    data = {name for name in used if not callable(getattr(VLLMGeneration, name, None))}
    assert data <= {"model", "accelerator", "_dist"}, f"`_iter_named_params` now also reads {data}"


def test_an_empty_completion_becomes_one_untrained_token() -> None:
    output = GenerationOutput.from_trajectories([Ledger([1, 2]).finish(StopReason.CONTEXT_FULL)], pad_id=7)
    assert output.completion_ids == [[7]] and output.mask == [[0]] and output.logprobs == [[0.0]]


def test_log_probabilities_are_given_whole_or_not_at_all() -> None:
    with_logprobs = Ledger([1])
    with_logprobs.sampled([2], [-1.0])
    without = Ledger([1], expects_logprobs=False)
    without.sampled([2], None)
    both = [with_logprobs.finish(StopReason.FINISHED), without.finish(StopReason.FINISHED)]
    assert GenerationOutput.from_trajectories(both, pad_id=0).logprobs is None


def test_another_version_of_trl_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl, "__version__", "9.9.9")
    with pytest.warns(UserWarning, match=r"tested with TRL 1\.16\.0; 9\.9\.9 is installed"):
        trl_seam.warn_if_untested()


def test_a_reward_that_changes_messages_changes_no_trajectory() -> None:
    ledger = Ledger([1])
    ledger.sampled([2], [-1.0])
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    ledger.say({"role": "assistant", "content": "so", "tool_calls": [call]})
    trajectory = ledger.finish(StopReason.FINISHED)
    (messages,) = GenerationOutput.from_trajectories([trajectory], pad_id=0).completions
    messages[0]["content"] = "forged"
    messages[0]["tool_calls"][0]["function"]["arguments"]["a"] = 2
    messages.append({"role": "assistant", "content": "more"})
    (kept,) = trajectory.messages
    assert kept["content"] == "so" and kept["tool_calls"][0]["function"]["arguments"] == {"a": 1}
