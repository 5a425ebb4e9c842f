"""What TRL's own tests of its GRPO trainer ask for: it trains, or is refused with a sentence."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from tests.support.chat_families import trl_tokenizer
from tests.support.trainings import run_to_end
from toolgrpo import ToolGRPOTrainer
from toolgrpo.errors import ConfigError, RewardError
from toolgrpo.rewards import get_reward
from toolgrpo.support.plugin_files import import_file
from toolgrpo.testing import ScriptedEngine, tiny_config, tiny_qwen3
from toolgrpo.testing.engine import Script

TOKENIZER = trl_tokenizer("qwen3")
END = TOKENIZER.eos_token_id
# In a file of its own: the tool workers import what a class stands in, and this file imports torch.
Counter: Any = import_file(Path(__file__).parents[1] / "fixtures" / "tools" / "counting_environment.py").Counter
TEXTS = [{"prompt": text} for text in ("Beautiful is", "Explicit is", "Simple is", "Complex is")]
QUESTIONS = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in TEXTS]

# One run each: what TRL's cases change in the config, put together where it goes together. `test_live_rows.py` has every loss.
OFF_POLICY = {"delta": 2.0, "off_policy_mask_threshold": 0.5}
OF_TERMS = {"use_bias_correction_kl": True, "multi_objective_aggregation": "normalize_then_sum"}
RUNS: dict[str, dict[str, Any]] = {
    "quantile": {"scale_rewards": "group", "top_entropy_quantile": 0.5, "gradient_accumulation_steps": 2},
    "synced": {"loss_type": "sapo", "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1},
    "entropy": {"loss_type": "vespo", "entropy_coef": 0.01, "cast_lm_head_to_fp32": True},
    "adaptive": {"use_adaptive_entropy": True, "entropy_target": 0.1, "dataloader_num_workers": 2},
    "off_policy": {**OFF_POLICY, "loss_type": "grpo", "num_generations": 8, "pad_to_multiple_of": 8},
    "kl": {**OF_TERMS, "beta": 0.1, "mask_truncated_completions": True},
    "peft_checkpointing": {"learning_rate": 1.0, "gradient_checkpointing": True},
    "sampling": {"top_p": 0.9, "top_k": 10, "min_p": 0.01, "repetition_penalty": 1.1, "engine": "transformers"},
    "eval": {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "num_generations_eval": 2},
}


class Silent:
    def reset(self, **row: Any) -> str:
        return "Guess."


PICTURES = Dataset.from_list([{**row, "image": b"a picture"} for row in QUESTIONS])
IN_PROMPTS = Dataset.from_list([{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}] * 4)
UNKNOWN = Dataset.from_list([{**row, "environment": "unknown"} for row in QUESTIONS])
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "images": ({}, {"train_dataset": PICTURES}, "a column 'image', .* Keep TRL's GRPOTrainer"),
    "images in the prompt": ({}, {"train_dataset": IN_PROMPTS}, "a prompt with an image, and episodes"),
    "images to evaluate on": ({}, {"eval_dataset": {"a": PICTURES}}, "a column 'image'"),
    "multimodal logs": ({"log_multimodal": False}, {}, "episodes are text"),
    "num_beams": ({"generation_kwargs": {"do_sample": True, "num_beams": 2}}, {}, "generation_kwargs has num_beams"),
    "rollout_func": ({}, {"rollout_func": print}, "implement it as tools or as an environment"),
    "several environments": ({}, {"environment_factory": {"a": dict, "b": dict}}, r"rows have the same one\. Write"),
    "an unknown environment": (
        {},
        {"environment_factory": {"counter": Counter}, "train_dataset": UNKNOWN},
        "'unknown', not among the environments",
    ),
    "no questions": ({"max_steps": -1}, {"environment_factory": Counter, "train_dataset": None}, "set max_steps"),
    "a method": ({}, {"environment_factory": Silent}, "has no public methods besides reset"),
    "continuous batching": ({"use_transformers_continuous_batching": True}, {}, "engine batches as it goes"),
    "no reward": ({}, {}, "No reward source provided"),
    "a reward of instances": ({}, {"environment_factory": Counter}, "live in the tool workers"),
    "structured outputs": ({"vllm_structured_outputs_regex": "x"}, {}, "malformed calls are answered"),
}


def by_length(completions: Sequence[Any], **_: Any) -> list[float]:
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [float(len(text) % 3) for text in texts]


def script(request: Any, number: int) -> list[int]:
    return [*TOKENIZER("word " * (1 + number % 3))["input_ids"], END]


def job(
    folder: Path,
    reward: Any,
    rows: Sequence[Mapping[str, Any]] | None = TEXTS,
    *,
    script: Script = script,
    parts: Mapping[str, Any] | None = None,
    **changes: Any,
) -> ToolGRPOTrainer:
    """A job as for TRL: its names changed, its prompts, rewards and settings as they were."""
    config = tiny_config(folder, **{"max_steps": 1, "logging_steps": 10, "learning_rate": 0.1, **changes})
    given = {"train_dataset": None if rows is None else Dataset.from_list([dict(row) for row in rows]), **(parts or {})}
    engine = None if config.engine == "transformers" else ScriptedEngine(script)
    model: Any = tiny_qwen3()
    if config.beta:  # TRL loads the reference model from where the model was loaded
        model.save_pretrained(folder / "model")
        model = str(folder / "model")
    return ToolGRPOTrainer(model, reward, config, processing_class=TOKENIZER, engine=engine, **given)


def trained(trainer: ToolGRPOTrainer) -> dict[str, Any]:
    """Train; return TRL's closing line."""
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    run_to_end(trainer)
    assert any(not torch.equal(before[name], value) for name, value in trainer.model.named_parameters())
    closing: dict[str, Any] = trainer.state.log_history[-1]
    assert closing["train_loss"] is not None and closing["step"] == trainer.state.global_step
    return closing


def reward_model() -> Any:
    from transformers import Qwen3ForSequenceClassification

    config = tiny_qwen3().config
    config.num_labels, config.pad_token_id = 1, TOKENIZER("x")["input_ids"][0]
    torch.manual_seed(1)
    return Qwen3ForSequenceClassification(config).float()


@pytest.mark.parametrize("name", RUNS)
def test_a_run_trains(name: str, tmp_path: Path) -> None:
    parts: dict[str, Any] = {"eval_dataset": Dataset.from_list(TEXTS[:2])} if name == "eval" else {}
    if name.startswith("peft"):
        parts["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = job(tmp_path, by_length, parts=parts, per_device_eval_batch_size=4, **RUNS[name])
    closing = trained(trainer)
    if name == "eval":  # TRL counts what follows an evaluation as part of it
        assert len([line for line in trainer.state.log_history if "eval_reward" in line]) >= 2
    else:
        assert closing["reward"] is not None and "rewards/by_length/mean" in closing
    if name in ("entropy", "adaptive"):
        assert {"entropy_coef", "policy_loss"} <= closing.keys(), "people's scripts read them in the closing line"


def of_instances(completions: list[Any], environments: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_alternative(name: str, tmp_path: Path) -> None:
    changes, parts, says = REFUSED[name]
    reward = {"no reward": None, "a reward of instances": of_instances}.get(name, by_length)
    with pytest.raises((ValueError, ImportError), match=says):
        job(tmp_path, reward, parts=parts, **changes).close()


def test_rewards_get_text_prompts_columns_and_messages(tmp_path: Path) -> None:
    seen: list[Any] = []

    def reward(
        prompts: list[Any], completions: list[Any], label: list[int], trainer_state: Any, log_metric: Any, **_: Any
    ) -> list[float]:
        seen.extend(zip(prompts, completions, label, strict=True))
        log_metric("seen", float(trainer_state.global_step))
        return [float(len(completion[-1]["content"])) for completion in completions]

    trainer = job(tmp_path, reward, [{**row, "label": i} for i, row in enumerate(TEXTS)])
    engine: Any = trainer.engine
    assert "seen" in trained(trainer)
    assert {text for text, _, _ in seen} <= {row["prompt"] for row in TEXTS}
    assert {said[-1]["content"] for _, said, _ in seen} == {"word ", "word word ", "word word word "}
    assert all(TEXTS[label]["prompt"] == text for text, _, label in seen)
    for request in engine.requests:
        assert TOKENIZER.decode(request.ids).startswith("<|im_start|>user")
    with job(tmp_path / "again", reward, [{**TEXTS[0], "label": 0}] * 4) as trainer:
        measured = trainer.measure([{**TEXTS[0], "label": 0}])
    assert [episode.total for episode in measured.episodes] == [len("word ")]


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@pytest.mark.parametrize("known", ["a function", "a model", "conversations", "tools", "a loaded reward", "more turns"])
def test_a_function_for_plain_text_is_warned_of(tmp_path: Path, known: str, caplog: pytest.LogCaptureFixture) -> None:
    rewards: Any = {"a model": reward_model(), "a loaded reward": get_reward("accuracy")}.get(known, by_length)
    rows: Any = QUESTIONS if known == "conversations" else [{**row, "answer": "x"} for row in TEXTS]
    if known == "more turns":
        rows = [{**row, "user_turns": ["Go on."]} for row in rows]
    parts = {"tools": {"tools": [add]}, "a model": {"reward_processing_classes": TOKENIZER}}
    job(tmp_path, rewards, rows, parts=parts.get(known)).close()
    assert ("reward by_length gets lists of messages" in caplog.text) == (known == "a function")


def test_a_reward_that_wants_strings_is_told_of_messages(tmp_path: Path) -> None:
    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [float(len(completion.strip())) for completion in completions]

    with pytest.raises(RewardError) as caught:
        trained(job(tmp_path, reward))
    assert "use TRL's GRPOTrainer" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("mode", ["chat", "conversation"])
def test_a_reward_model_judges_groups_as_they_end(tmp_path: Path, mode: str) -> None:
    """Of the first question all answers are alike: with backfill the run is one that never drew it."""
    rows = QUESTIONS if mode == "conversation" else TEXTS

    def run(folder: Path, rows: Sequence[Mapping[str, Any]], **more: Any) -> tuple[dict[str, Any], Any]:
        asked: dict[str, int] = {}

        def answer(request: Any, number: int) -> list[int]:
            text = TOKENIZER.decode(request.ids)
            asked[text] = asked.get(text, 0) + 1
            n_words = 2 if "Beautiful" in text else 1 + asked[text] % 3
            return [*TOKENIZER("word " * n_words)["input_ids"], END]

        parts = {"reward_processing_classes": [None, TOKENIZER]}
        rewards = [by_length, reward_model()]
        trainer = job(folder, rewards, rows, script=answer, parts=parts, shuffle_dataset=False, **more)
        return trained(trainer), list(trainer.model.parameters())

    drawn, weights = run(tmp_path / "drawn", rows, dynamic_sampling="backfill")
    once, expected = run(tmp_path / "once", rows[1:3])
    assert drawn["sampling/groups_drawn"] == 3 and drawn["sampling/live_rate"] == pytest.approx(2 / 3)
    assert drawn["reward_trained"] == pytest.approx(once["reward"], rel=1e-6)
    torch.testing.assert_close(weights, expected, rtol=0.0, atol=1e-3)  # a step of Adam is 0.1


def test_none_of_one_reward_leaves_the_others(tmp_path: Path) -> None:
    def silent(completions: list[Any], **_: Any) -> list[None]:
        return [None] * len(completions)

    async def later(completions: list[Any], **_: Any) -> list[float]:
        return [1.0] * len(completions)

    closing = trained(job(tmp_path, [by_length, silent, later], reward_weights=[0.7, 1.0, 0.3]))
    assert closing["reward"] == pytest.approx(0.7 * closing["rewards/by_length/mean"] + 0.3)
    assert closing["rewards/silent/mean"] is None


def test_rows_that_stream(tmp_path: Path) -> None:
    rows = Dataset.from_list(TEXTS).to_iterable_dataset()
    trainer = job(tmp_path, by_length, None, parts={"train_dataset": rows}, dataloader_num_workers=2)
    assert (trainer.args.dataloader_num_workers, trainer.args.accelerator_config.dispatch_batches) == (0, False)
    assert trained(trainer)["reward"] is not None
    with pytest.raises(ValueError, match="Iterable datasets require `dispatch_batches=False`"):
        given: Any = {"accelerator_config": {"dispatch_batches": True}, "parts": {"train_dataset": rows}}
        job(tmp_path, by_length, None, **given).close()
    parts = {"eval_dataset": rows}
    trainer = job(tmp_path, by_length, parts=parts, dataloader_num_workers=2)
    assert trainer.args.dataloader_num_workers == 2, "only the evaluation streams"
    trainer.close()


def test_template_arguments_reach_the_template(tmp_path: Path) -> None:
    told = {"today": "Monday", "enable_thinking": False}
    trainer = job(tmp_path, by_length, QUESTIONS, chat_template_kwargs=told)
    assert trainer.card.template_arguments == told, "a user of the model tells its template the same"
    assert trainer.args.enable_thinking is False
    engine: Any = trainer.engine
    trained(trainer)
    assert all("<think>\n\n</think>" in TOKENIZER.decode(request.ids) for request in engine.requests)
    with pytest.raises(ConfigError, match="keep one of them"):
        tiny_config(tmp_path, chat_template_kwargs={"enable_thinking": False}, enable_thinking=True)
    with pytest.raises(ConfigError, match="which each episode says itself"):
        tiny_config(tmp_path, chat_template_kwargs={"tools": []})


def test_an_environment_factory_is_an_environment(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "increment", "arguments": {"step": 1}}\n</tool_call>'
    first_turns = itertools.count()

    def counting(request: Any, number: int) -> list[int]:
        asked = TOKENIZER.decode(request.ids)
        assert "Count to one." in asked and "increment" in asked
        answered = "<tool_response>" in asked.rpartition("Count to one.")[2]
        return [*TOKENIZER("Done" if answered or next(first_turns) % 2 else call)["input_ids"], END]

    parts = {"train_dataset": None, "environment_factory": Counter}
    trainer = job(tmp_path, by_length, script=counting, parts=parts, reward_weights=[0.5])
    assert trainer.reward_func_names == ["by_length", "Counter"]
    assert trainer.reward_weights.tolist() == [0.5, 1.0]
    assert trainer.toolbox is not None and trainer.toolbox.names == ["increment"]
    closing = trained(trainer)
    assert closing["rewards/Counter/mean"] == 0.5 and closing["tools/call_frequency"] == 0.5
