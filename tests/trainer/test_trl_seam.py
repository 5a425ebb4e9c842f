"""What `trainer/trl/trainer.py` and checkpoints rely on in TRL, Transformers and accelerate.

A failure here says what to look at after an upgrade.
"""

from __future__ import annotations

import inspect
import io
import re
import subprocess
import sys
from inspect import getsource as source
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import trl
from accelerate.state import AcceleratorState
from transformers import GenerationMixin, GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, Trainer
from trl import GRPOTrainer
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration
from trl.kernels import chunked_logprob
from trl.trainer import utils

from toolgrpo.episode.token_ledger import Ledger
from toolgrpo.episode.trajectory import StopReason, Trajectory
from toolgrpo.errors import ConfigError
from toolgrpo.testing import ByteChat, tiny_trainer
from toolgrpo.trainer.trl import trainer as trl_trainer
from toolgrpo.trainer.trl.batch import as_trl

pytestmark = pytest.mark.contract


def test_the_installed_trl_is_a_tested_one() -> None:
    assert trl.__version__ in trl_trainer.TESTED_VERSIONS, "add it to TESTED_VERSIONS once all tests pass with it"


def of_one_token(logprobs: list[float] | None, **said: Any) -> Trajectory:
    ledger = Ledger([1], expects_logprobs=logprobs is not None)
    ledger.sampled([2], logprobs)
    if said:
        ledger.say(said)
    return ledger.finish(StopReason.FINISHED)


def test_generate_still_returns_the_same_eight_things() -> None:
    returned = re.findall(r"return (.+)$", source(GRPOTrainer._generate), re.M)[-1]
    expected = "prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images, tool_images"
    assert returned == expected, f"`_generate` now returns ({returned}); adapt as_trl"
    assert len(as_trl([of_one_token([-1.0])], pad_id=0)) == len(expected.split(", "))


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("_generate", ["self", "prompts"]),
        ("_generate_and_score_completions", ["self", "inputs"]),
        ("_calculate_rewards", ["self", "inputs", "prompts", "completions", "completion_ids_list"]),
        ("_save_checkpoint", ["self", "model", "trial"]),
        ("_push_from_checkpoint", ["self", "checkpoint_folder"]),
        ("_determine_best_metric", ["self", "metrics", "trial"]),
    ],
)
def test_what_we_override_is_given_the_same(method: str, parameters: list[str]) -> None:
    assert list(inspect.signature(getattr(GRPOTrainer, method)).parameters) == parameters
    assert "extra_fields" in source(GRPOTrainer._generate_and_score_completions), "they reach the reward function"


def test_the_weight_walker_needs_nothing_we_do_not_give_it() -> None:
    used = set()
    for name in ("_iter_named_params", "_iter_fsdp_params", "_iter_fsdp1_params", "_iter_fsdp2_params"):
        used |= set(re.findall(r"self\.(\w+)", source(getattr(VLLMGeneration, name))))
    data = {name for name in used if not callable(getattr(VLLMGeneration, name, None))}
    assert data <= {"model", "accelerator", "_dist"}, f"`_iter_named_params` now also reads {data}"


def test_an_empty_completion_becomes_one_untrained_token_and_log_probabilities_are_given_whole_or_not_at_all() -> None:
    output = as_trl([Ledger([1, 2]).finish(StopReason.CONTEXT_FULL)], pad_id=7)
    assert output[1:3] == ([[7]], [[0]]) and output[4] == [[0.0]]
    assert as_trl([of_one_token([-1.0]), of_one_token(None)], pad_id=0)[4] is None


def test_another_version_of_trl_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl, "__version__", "9.9.9")
    with pytest.warns(UserWarning, match=r"TRL 1\.16\.0; 9\.9\.9"):
        trl_trainer.warn_if_untested()


def test_a_reward_that_changes_messages_changes_no_trajectory() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    trajectory = of_one_token([-1.0], role="assistant", content="so", tool_calls=[call])
    (messages,) = as_trl([trajectory], pad_id=0)[3]
    messages[0]["content"] = "forged"
    messages[0]["tool_calls"][0]["function"]["arguments"]["a"] = 2
    messages.append({"role": "assistant", "content": "more"})
    (kept,) = trajectory.messages
    assert kept["content"] == "so" and kept["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def test_the_fused_head_reads_where_we_tune_it() -> None:
    assert source(chunked_logprob.ChunkedLogProbFunction).count("range(0, N, TOKEN_CHUNK_SIZE)") == 2
    assert re.findall(r".*_use_triton\(.*", source(utils)) == ["        compact = _use_triton(hidden_states.device)"], (
        "`_use_triton` decides about something else now; see tune_fused_head"
    )
    assert "                _CHUNKED_LOGPROB_CHUNK_SIZE,\n" in source(utils), "the tiles come from elsewhere now"


def test_a_tuned_head_scores_the_same_in_small_tiles_without_what_has_no_label(
    monkeypatch: pytest.MonkeyPatch, tiny_qwen3: Any
) -> None:
    ids = torch.randint(0, 320, (2, 700), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :300] = -100
    labels[1, 600:] = -100
    tiles: list[int] = []
    fold = chunked_logprob._forward_tile

    def counting_fold(tile: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        tiles.append(len(tile))
        fold(tile, *args, **kwargs)

    def scored() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        tiles.clear()
        model = tiny_qwen3(0)
        utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        output = model(input_ids=ids, labels=labels, fused_lm_head=True)
        output.log_probs.sum().backward()
        return output.log_probs, output.entropy, [parameter.grad for parameter in model.parameters()]

    monkeypatch.setattr(chunked_logprob, "TOKEN_CHUNK_SIZE", 4096)  # all are put back after the test
    monkeypatch.setattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 32768)
    monkeypatch.setattr(utils, "_use_triton", chunked_logprob._use_triton)
    monkeypatch.setattr(chunked_logprob, "_forward_tile", counting_fold)
    logps, entropies, gradients = scored()
    assert tiles == [2 * 699], "TRL now leaves out what has no label on the CPU too"
    trl_trainer.tune_fused_head(torch.device("cpu"))
    tuned_logps, tuned_entropies, tuned_gradients = scored()
    assert tiles == [256, 256, 400 + 300 - 512] and utils._CHUNKED_LOGPROB_CHUNK_SIZE == 4096
    torch.testing.assert_close(tuned_logps, logps, atol=1e-5, rtol=0)
    torch.testing.assert_close(tuned_entropies[labels[:, 1:] != -100], entropies[labels[:, 1:] != -100])
    for tuned, whole in zip(tuned_gradients, gradients, strict=True):
        torch.testing.assert_close(tuned, whole, atol=1e-4, rtol=1e-4)


def test_a_head_for_supervised_training_has_trls_tiles(tiny_qwen3: Any) -> None:
    trl_trainer.tune_fused_head(torch.device("cpu"))
    trl_trainer.add_fused_head(tiny_qwen3(0))
    assert (chunked_logprob.TOKEN_CHUNK_SIZE, utils._CHUNKED_LOGPROB_CHUNK_SIZE) == (4096, 32768)
    assert utils._use_triton is chunked_logprob._use_triton
    for line, file in (("TOKEN_CHUNK_SIZE = 4096", chunked_logprob), ("_CHUNKED_LOGPROB_CHUNK_SIZE = 32768", utils)):
        assert f"\n{line}\n" in source(file), "TRL's tile has changed; see trl_trainer._TRL_TILE"


def ending_trainer(folder: Path, **changes: Any) -> Any:
    def alternating(completions: list[Any], **_: Any) -> list[float]:
        return [float(place % 2) for place in range(len(completions))]

    return tiny_trainer(folder, alternating, lambda request, number: ByteChat.say("end"), max_steps=1, **changes)


def dense_granite() -> Any:
    config = GraniteMoeHybridConfig(
        **{"vocab_size": 320, "hidden_size": 64, "shared_intermediate_size": 64, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 0, "layer_types": ["attention"]},
        **{"pad_token_id": None, "bos_token_id": None, "eos_token_id": 316},
    )
    return GraniteMoeHybridForCausalLM(config)


def test_a_load_balancing_loss_without_experts_is_refused_before_the_training(tmp_path: Path) -> None:
    """Granite 4 asks for that loss by its configuration, in its dense sizes too."""
    model, ids = dense_granite(), torch.ones(1, 4, dtype=torch.long)
    utils.add_fused_lm_head(model)
    with pytest.raises(AttributeError, match="num_experts"):  # if not, `check_router_loss` can go
        model(input_ids=ids, labels=ids, fused_lm_head=True, output_router_logits=True)

    def train(**changes: Any) -> None:
        with ending_trainer(tmp_path, model=dense_granite(), **changes) as trainer:
            trainer.train()

    with pytest.raises(ConfigError, match=r"GraniteMoeHybridForCausalLM .* \(num_experts: None\); set router_aux"):
        train()
    train(router_aux_loss_coef=0.0)


def test_a_replaced_generate_is_refused(tmp_path: Path) -> None:
    with ending_trainer(tmp_path) as trainer:
        for of, by in ((trainer.model, MagicMock()), (trainer.model, print), (GenerationMixin, MagicMock())):
            with patch.object(of, "generate", new=by), pytest.raises(ConfigError, match=r"`generate`.*\(`engine=`"):
                trainer.train()
        trainer.train()  # taken off again
        assert trainer.state.global_step == trainer.state.max_steps


def test_the_place_in_a_generation_batch_is_still_two_attributes() -> None:
    text = source(GRPOTrainer._prepare_inputs)
    assert "generate_every = self.args.steps_per_generation * self.num_iterations" in text, "see place_in_batch"
    assert "self._step % generate_every == 0 or self._buffered_inputs is None" in text, "see restore_place_in_batch"
    assert "self._buffered_inputs[self._step % self.args.steps_per_generation]" in text


def test_the_sampler_still_has_one_generator_for_all_epochs() -> None:
    """If TRL learns to start in a later epoch by itself, `skip_epochs` must go."""
    assert not hasattr(utils.RepeatSampler, "set_epoch")
    first, second = (utils.RepeatSampler(list(range(20)), 1, batch_size=2, seed=5) for _ in range(2))
    epochs = [list(first), list(first)]
    torch.randperm(second.num_samples, generator=second.generator)
    assert list(second) == epochs[1] != epochs[0]


def test_checkpoints_are_still_written_and_rotated_in_one_call() -> None:
    text = source(Trainer._save_checkpoint)
    assert "save_total_limit=self.args.save_total_limit" in text, "see Checkpoints.save, which puts rotation off so"
    assert text.index("_save_rng_state") < text.index("rotate_checkpoints(")


def test_random_numbers_are_still_restored_after_the_batch_is_drawn() -> None:
    text = source(Trainer._run_epoch)
    assert text.index("self.get_batch_samples(") < text.rindex("self._load_rng_state(")
    order = source(Trainer._inner_training_loop)
    assert order.index("on_train_begin") < order.index("self._run_epoch("), "the place is restored in on_train_begin"


def test_the_device_of_a_process_on_the_cpu_can_be_loaded_onto() -> None:
    """PyTorch alone cannot load onto `cpu:0`, which accelerate calls it."""
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(2)}, buffer)
    buffer.seek(0)
    assert torch.load(buffer, map_location=torch.device("cpu", 0))["a"].tolist() == [1.0, 1.0]


def test_fsdp_is_still_for_accelerators_only() -> None:
    """If accelerate sets FSDP up on CPUs by itself, `tests.support.fsdp` must go."""
    assert "DistributedType.MULTI_CPU" not in source(AcceleratorState.__init__)
    assert "fsdp_plugin" in inspect.signature(AcceleratorState.__init__).parameters


def test_the_backend_of_trl_says_what_the_walker_asks() -> None:
    for name in ("is_fsdp", "is_zero3", "gather_params"):
        assert hasattr(DistributedBackend, name), f"DistributedBackend.{name} is gone; see iter_named_params"


def test_a_trainer_imports_vllm_and_trackers_only_when_they_are_used_and_without_a_warning() -> None:
    """In a process of its own: TRL imports all of it otherwise, would warn five times of a vLLM that is newer than its
    own list, and its own generation must still find it.
    """
    pytest.importorskip("vllm", reason="vLLM is not installed")
    pytest.importorskip("wandb", reason="wandb is not installed")
    script = """
import sys
import toolgrpo
toolgrpo.ToolGRPOTrainer
import toolgrpo.commands.sft
from trl.generation import vllm_client, vllm_generation
from trl.trainer import base_trainer
print("-- all is imported --", file=sys.stderr)
loaded = {name.split(".")[0] for name in sys.modules}
print(loaded & {"vllm", "wandb", "trackio"}, vllm_client._HAS_STATEFUL_TRAINER_ENGINE, base_trainer.wandb.run)
print(vllm_generation.SamplingParams(n=3).n, vllm_generation.LLM.__name__, "." in vllm_client.get_ip(), base_trainer.wandb.Table.__name__)
import wandb
wandb.run = "begun"
print(base_trainer.wandb.run)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.splitlines()[-3:] == ["set() True None", "3 LLM True Table", "begun"]
    assert "vLLM" not in done.stderr.split("-- all is imported --")[0]
