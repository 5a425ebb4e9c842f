"""What a training pass is expected to take, beside what it was measured to take, and what a run does about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from tests.support.trainings import by_length, varied
from toolgrpo import ToolGRPOConfig
from toolgrpo.engines.base import CacheRoom
from toolgrpo.engines.build import EngineOptions
from toolgrpo.engines.vllm_options import VLLMOptions
from toolgrpo.errors import ConfigError
from toolgrpo.models.adapter_step import join_adapters
from toolgrpo.shared_pass.scoring import SharedPass
from toolgrpo.testing.trainers import tiny_trainer
from toolgrpo.trainer import memory
from toolgrpo.trainer.memory import Device, PassShape, RunShape, estimate, free_bytes
from toolgrpo.trainer.training_pass import PassSizes

GIB = 2**30
LORA = 366_592  # weights of rank 16 in a layer of Qwen2.5-0.5B
OF_QWEN: Any = {"layers": 24, "width": 896, "heads": 1152, "inner": 4864, "n_trained": 24 * LORA, "itemsize": 4}
QWEN = PassShape(**OF_QWEN, bytes_of_weights=12 * 24 * LORA, checkpointing=True)


def test_rows_of_many_prompts_are_counted_where_passes_stay_shuffled(tmp_path: Path) -> None:
    def largest(**changes: Any) -> int:
        sizes = {"per_device_train_batch_size": 4, "steps_per_generation": 4, **changes}
        with tiny_trainer(tmp_path, lambda **_: [], None, engine="transformers", **sizes) as trainer:
            found = PassSizes.of(trainer.parts, trainer.train_dataset)
            assert found is not None
            return found.largest

    together = largest(gradient_accumulation_steps=4)
    assert largest(gradient_accumulation_steps=1) > together
    assert largest(gradient_accumulation_steps=4, top_entropy_quantile=0.5) > together


@pytest.mark.parametrize("case", ["fp32", "bf16 by autocast", "bf16, adapters", "bf16, adapters with dropout"])
def test_what_a_pass_keeps_is_what_its_shape_says(tmp_path: Path, case: str) -> None:
    """Counted: the storages that the forward pass keeps for the backward pass, without checkpointing."""
    dtype = torch.bfloat16 if "bf16" in case else torch.float32
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": 4}
    model: Any = Qwen2ForCausalLM(Qwen2Config(vocab_size=320, hidden_size=128, intermediate_size=512, **sizes)).train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if "adapters" in case:  # with dropout they copy what they read
        dropout = 0.1 if "dropout" in case else 0.0
        model = get_peft_model(model.to(dtype), LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout))
        join_adapters(model)
    ids = torch.randint(0, 300, (4, 300), generator=torch.Generator().manual_seed(0))
    ids[:, :200] = ids[0, :200].clone()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}  # holds them, so that no storage takes the place of another

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    autocast = torch.autocast("cpu", dtype, enabled="autocast" in case)
    with autocast, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scored = SharedPass(mode="on").score(model, ids, torch.ones_like(ids), 100, unwrapped=model)
    assert scored is not None
    without = ToolGRPOConfig(str(tmp_path), gradient_checkpointing=False)
    shape = RunShape.of(model, without, dtype=dtype, context=9, **COLOCATED).passes
    assert shape is not None
    counted = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)
    of_layers = shape.bytes_per_token - replace(shape, layers=0).bytes_per_token
    assert 0.8 * 600 * of_layers < counted < 1.15 * 600 * of_layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_step_holds_is_what_the_model_says(tmp_path: Path, dtype: torch.dtype) -> None:
    """Counted: weights, gradients and averages of a real step."""
    sizes: Any = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes)).to(dtype)
    frozen = model.model.embed_tokens.weight.requires_grad_(False)
    run = RunShape.of(model, ToolGRPOConfig(str(tmp_path), beta=0.1), dtype=dtype, context=9, **COLOCATED)
    optimizer = torch.optim.AdamW(weight for weight in model.parameters() if weight.requires_grad)
    ids = torch.arange(12).reshape(2, 6)
    model(ids, labels=ids).loss.backward()
    optimizer.step()

    def held(tensors: Any) -> int:
        return sum(one.numel() * one.element_size() for one in tensors if one is not None and one.dim())

    weights = list(model.parameters())
    assert run.weights == run.reference == held(weights) and run.n_weights * dtype.itemsize == run.weights
    assert run.gradients == held(weight.grad for weight in weights) == run.weights - held([frozen])
    assert run.optimizer == held(state for one in optimizer.state.values() for state in one.values())
    assert run.passes is not None
    assert run.passes.bytes_of_weights == run.gradients + run.optimizer + 4 * model.lm_head.weight.numel()


COLOCATED: Any = {"engine": "vllm_colocate", "at_a_time": 16}
GPU = Device.named("16GB")
QUARTER = 0.25 * 16 * 0.98
SIZES: Any = {
    **{"n_weights": GIB, "weights": 4 * GIB, "gradients": 4 * GIB, "optimizer": 8 * GIB, "reference": 0},
    **{"head_gradient": GIB, "casts": 0, "passes": None, "vocabulary": 1000, "rows": 2, "context": 1024},
    **{"itemsize": 2, "cached_token": 2**10, "options": EngineOptions(vllm=VLLMOptions(gpu_memory_utilization=0.25))},
}
RUN = RunShape(**SIZES, **COLOCATED)


@pytest.mark.parametrize(
    ("changes", "device", "needed"),
    [
        ({}, GPU, 17.6 + QUARTER),  # weights, gradients, Adam, head, CUDA, and a quarter of the card
        ({}, Device(16 * GIB, is_cpu=True), 17 + 3),  # a copy of the weights, and the cache; no CUDA
        ({"reference": 4 * GIB}, GPU, 21.6 + QUARTER),
        ({"casts": 2 * GIB}, GPU, 18.6 + QUARTER),  # in the forward pass, when the head has no gradient yet
        ({"engine": "vllm_server"}, GPU, 17.6),
        ({"engine": "transformers", "cached_token": 2**19}, GPU, 20.6),  # 8 GiB of cache instead of a pass of 5
        ({"engine": "transformers", "options": EngineOptions(own_copy=True)}, GPU, 19.6),
        # vLLM's part is smaller than a pass, and there only before it
        ({"options": EngineOptions(vllm=VLLMOptions(enable_sleep_mode=True))}, GPU, 17.6),
    ],
)
def test_the_parts_are_added_up(changes: dict[str, Any], device: Device, needed: float) -> None:
    found = estimate(replace(RUN, **changes), device)
    assert found.needed / GIB == pytest.approx(needed, abs=0.02) and not found.fits
    assert f"of {device.n_bytes / GIB:.1f} GiB (weights 4.0, " in str(found)
    assert found.fixed < found.needed


def test_the_cache_is_what_weights_and_graphs_leave_of_the_share() -> None:
    small = estimate(replace(RUN, n_weights=GIB // 2), GPU).cache
    assert small is not None and small.tokens == pytest.approx((0.25 * 15.68 - 1 - 0.85) * 2**20, rel=0.001)
    tenth = EngineOptions(vllm=VLLMOptions(gpu_memory_utilization=0.1))
    assert estimate(replace(RUN, options=tenth), GPU).cache == CacheRoom(0, 1024, 16), "not even the weights"
    assert estimate(replace(RUN, cached_token=None), GPU).cache is None


def test_a_card_is_named_by_its_memory() -> None:
    assert Device.named("24GB").n_bytes / GIB == pytest.approx(23.52)
    assert Device.named("22.5 GiB").n_bytes / GIB == pytest.approx(22.5)
    with pytest.raises(ConfigError, match=r"24GB.*'T4'"):
        Device.named("T4")


def decided(shape: PassShape, free_gib: float, *, given: int | None = None, shares: bool = True) -> tuple[Any, str]:
    """For 16 rows of two prompts of 2,500 tokens, with completions of 512."""
    said: list[str] = []
    sizes = {"largest": 2 * 2500 + 16 * 512, "of_a_row": 3012, "free": int(free_gib * GIB)}
    most = memory.most_tokens(shape, **sizes, given=given, shares=shares, say=said.append)
    (line,) = said
    return most, line


@pytest.mark.parametrize(
    ("of_process", "group", "limit", "used"),
    [
        ("0::/", "", "memory.max", "anon"),
        ("0::/slurm/job_7/step_0", "slurm/job_7", "memory.max", "anon"),
        ("9:name=systemd:/\n4:memory:/docker/7", "memory", "memory.limit_in_bytes", "total_rss"),
        ("4:memory:/job", "memory/job", "memory.limit_in_bytes", "total_rss"),
    ],
)
def test_the_limit_of_each_control_group_counts(
    tmp_path: Path, of_process: str, group: str, limit: str, used: str
) -> None:
    (tmp_path / group).mkdir(parents=True, exist_ok=True)
    (tmp_path / group / limit).write_text("1000\n")
    (tmp_path / group / "memory.stat").write_text(f"file 7\n{used} 300\n")
    assert min(memory._left_by_groups(tmp_path, of_process)) == 700


def test_a_pass_is_cut_where_the_machine_is_too_small() -> None:
    most, line = decided(QWEN, 20)
    assert most is None and "13,192 tokens in 24 layers, with gradient" in line
    most, line = decided(QWEN, 2)
    assert most is not None and 3012 < most < 13_192 and f"{most:,} tokens" in line
    assert QWEN.bytes_of(most) <= 0.9 * 2 * GIB
    assert decided(QWEN, 2, given=9000)[0] == 9000, "the user's own number wins"
    most, line = decided(QWEN, 2, shares=False)
    assert most is None and "--per_device_train_batch_size" in line


@pytest.mark.parametrize(
    ("shape", "helpful"),
    [
        (QWEN, "--max_completion_length"),
        (replace(QWEN, checkpointing=False), "--gradient_checkpointing"),
        (replace(QWEN, n_trained=494_032_768, bytes_of_weights=6 * 494_032_768), "--use_peft"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_with_the_flag_that_helps(shape: PassShape, helpful: str) -> None:
    with pytest.raises(ConfigError, match=f"3,012 tokens in 24 layers.*0.5 GiB.*{helpful}"):
        decided(shape, 0.5)
    assert decided(shape, 0.5, given=3012)[0] == 3012


KEPT = replace(RUN, passes=replace(QWEN, itemsize=2), gradients=0, optimizer=0, head_gradient=0)


@pytest.mark.parametrize(
    ("changes", "n_processes", "needed"),
    [  # 24 layers of 27,776 numbers for each of 10,000 tokens, and its width in fp32 for the head; then something more
        ({"engine": "vllm_colocate"}, 1, 12.79),  # whose part of a GPU is taken already
        ({"gradients": GIB, "optimizer": 2 * GIB}, 2, 16.79),  # DDP holds gradients twice
        ({"passes": replace(QWEN, itemsize=2, copies=4)}, 1, 19.54),  # of adapters in fp32
        ({"engine": "transformers", "options": EngineOptions(own_copy=True), "cached_token": 2**16}, 1, 13.79),
    ],
)
def test_activations_are_kept_where_they_clearly_fit(changes: dict[str, Any], n_processes: int, needed: float) -> None:
    run, said = replace(KEPT, **changes), list[str]()
    for free, keeps in ((needed / 0.75 + 0.05, True), (needed / 0.75 - 0.05, False)):
        there: Any = {"free": int(free * GIB), "n_processes": n_processes, "say": said.append}
        assert memory.keeps_activations(run, GPU, tokens=10_000, **there) is keeps
        assert f"{'without' if keeps else 'with'} gradient checkpointing: a pass over 10,000 tokens" in said[-1]
        assert f"adds {needed:.1f} GiB" in said[-1] and said[-1].endswith("it fits") is keeps
    assert not memory.keeps_activations(replace(run, cached_token=None), GPU, tokens=1, **there), "recurrent layers"


def opened(folder: Path, **changes: Any) -> Any:
    return tiny_trainer(folder, by_length, varied, **changes)


def test_auto_trains_the_same_and_keeps_to_the_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both sides of the border: episodes that fit, and such that eight would fill the machine."""
    weights = []
    for asked in ("auto", True):
        with opened(tmp_path, gradient_checkpointing=asked, learning_rate=1e-2) as trainer:
            before = trainer.model.model.embed_tokens.weight.detach().clone()
            trainer.train()
            assert trainer.args.gradient_checkpointing is trainer.model.is_gradient_checkpointing is (asked is True)
            weights += [list(trainer.model.parameters())]
    assert not torch.equal(weights[0][0], before)
    torch.testing.assert_close(*weights)
    free, a_token = free_bytes(), PassShape.of(trainer.model, checkpointing=False)
    assert free is not None and a_token is not None
    for changes in ({"max_completion_length": free // a_token.bytes_per_token // 4}, {"context": {"max_tokens": 200}}):
        with opened(tmp_path, gradient_checkpointing="auto", **changes) as trainer:
            assert trainer.args.gradient_checkpointing is True
    shown = " ".join(capsys.readouterr().err.split())
    assert shown.count("memory without gradient") == 1 and shown.count("memory with gradient") == 2


def test_a_run_says_what_its_passes_need_and_cuts_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert QWEN.is_large(5070)
    with opened(tmp_path, max_completion_length=100) as trainer:
        shape = PassShape.of(trainer.model, checkpointing=False)
        assert trainer._shared_pass.max_tokens is None and shape is not None and not shape.is_large(300)
    free = free_bytes()
    assert shape is not None and free is not None
    half = free // shape.bytes_per_token // 2  # of the memory for a row, and a batch has eight
    with opened(tmp_path, max_completion_length=half) as trainer:
        most = trainer._shared_pass.max_tokens
        assert most is not None and shape.bytes_of(most) < free
    shown = capsys.readouterr().err
    assert shown.count("a training pass has at most") == 2 and f"at most {most:,} tokens" in " ".join(shown.split())
    with pytest.raises(ConfigError, match="does not fit into memory"):
        opened(tmp_path, max_completion_length=2 * free // shape.bytes_per_token)
