"""The prefix-shared pass against the padded pass of TRL's fused head: values and gradients, model family by family."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from trl.trainer.utils import add_fused_lm_head

from tests.support.flash_kernels import attending
from tests.support.model_families import tiny_family
from toolgrpo.errors import ModelError
from toolgrpo.shared_pass.attention import NAME, shared_attention
from toolgrpo.shared_pass.scoring import SharedPass, is_shared, unsupported, unsupported_model
from toolgrpo.trainer.trl.trainer import TrainerOfTRL

VOCABULARY = 97
COLUMNS = 20
SHAPE: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True},
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
}
SMALL = {"patch_size": 14, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
SLIDING, WHOLE = "sliding_attention", "full_attention"
WINDOWED: dict[str, Any] = {"sliding_window": 12, "layer_types": [SLIDING, WHOLE, SLIDING]}
GEMMA4: dict[str, Any] = {
    **{"sliding_window": 12, "layer_types": [SLIDING, WHOLE, WHOLE]},
    **{"global_head_dim": 32, "pad_token_id": 0, "num_kv_shared_layers": 1, "use_bidirectional_attention": "vision"},
    **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY},
}
RECURRENT = ["linear_attention", "full_attention", "linear_attention"]
DELTA: dict[str, Any] = {
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"head_dim": 16, "layer_types": RECURRENT},
}
GRANITE: dict[str, Any] = {
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16},
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 96},
    **{"position_embedding_type": "nope", "output_router_logits": False},
}


def of_text(name: str, config: str = "", **own: Any) -> Callable[..., Any]:
    """Make models of a class of Transformers, with what is its own beside the common shape."""

    def made(**changes: Any) -> Any:
        values = {**SHAPE, **own, **changes}
        return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, config or f"{name}Config")(**values))

    return made


def with_images(name: str, text: dict[str, Any], vision: dict[str, Any], **own: Any) -> Callable[..., Any]:
    own |= {"text_config": {**SHAPE, "head_dim": 16, **text}, "vision_config": {**SMALL, **vision}}
    config = getattr(transformers, f"{name}Config")
    return lambda **_: getattr(transformers, f"{name}ForConditionalGeneration")(config(**own))


HYBRIDS = ("qwen3_5", "lfm2_hybrid", "nemotron_h_dense")  # one for each kind of recurrence
OURS = ("qwen3_moe", "qwen3_next", "lfm2_hybrid", "nemotron_h_dense")
FAMILIES: dict[str, Callable[..., Any]] = {
    "qwen3": of_text("Qwen3", head_dim=16),
    "qwen2": of_text("Qwen2"),
    "llama": of_text("Llama"),
    "mistral": of_text("Mistral", head_dim=16, sliding_window=9),
    "gemma3": of_text("Gemma3", "Gemma3TextConfig", head_dim=16, **WINDOWED),
    # Experts; then hybrids: layers with a recurrence or a short convolution beside those with attention.
    **{name: functools.partial(tiny_family, name) for name in OURS},
    "qwen3_5": of_text("Qwen3_5", "Qwen3_5TextConfig", **DELTA),
    "granite4": of_text("GraniteMoeHybrid", layer_types=RECURRENT, **GRANITE),
    # Models that also read images, on rows of text.
    "gemma3_images": with_images("Gemma3", WINDOWED, {"image_size": 28}, mm_tokens_per_image=4),
    "gemma4_images": with_images("Gemma4", GEMMA4, {"num_key_value_heads": 2, "head_dim": 16}, audio_config=None),
    "mistral3_images": with_images("Mistral3", {"model_type": "mistral"}, {"model_type": "pixtral", "head_dim": 16}),
}


def make(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = FAMILIES[family](**changes).float()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, *((1.0, 0.1) if parameter.dim() == 1 else (0.0, 0.02)))
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    return model.train()


cached = functools.cache(make)


class Batch(NamedTuple):
    """TRL's shape: prompts left padded, completions right padded."""

    ids: torch.Tensor
    mask: torch.Tensor

    @property
    def weights(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(5)
        return torch.randn(len(self.ids), COLUMNS, generator=generator) * self.mask[:, -COLUMNS:]


def batch(prompts: list[int], group: int = 4, *, lengths: list[int] | None = None, seed: int = 1) -> Batch:
    """A group of completions for each prompt length; a length of 0 is a completion without a token."""
    generator = torch.Generator().manual_seed(seed)
    width = max(prompts)
    ids = torch.zeros(len(prompts) * group, width + COLUMNS, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for number, n_prompt in enumerate(prompts):
        prompt = torch.randint(0, VOCABULARY, (n_prompt,), generator=generator)
        for member in range(group):
            row = number * group + member
            n_own = lengths[row] if lengths else int(torch.randint(1, COLUMNS + 1, (), generator=generator))
            ids[row, width - n_prompt : width] = prompt
            ids[row, width : width + n_own] = torch.randint(0, VOCABULARY, (n_own,), generator=generator)
            mask[row, width - n_prompt : width + n_own] = 1
    return Batch(ids, mask)


class Result(NamedTuple):
    logps: torch.Tensor
    entropies: torch.Tensor
    gradient: torch.Tensor


def with_gradient(model: Any, rows: Batch, score: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> Result:
    model.zero_grad()
    logps, entropies = score()
    ((logps + 0.3 * entropies) * rows.weights).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return Result(logps.detach(), entropies.detach(), gradient)


def padded_output(model: Any, rows: Batch) -> Any:
    labels = rows.ids.masked_fill(rows.mask == 0, -100)
    labels[:, :-COLUMNS] = -100
    return model(input_ids=rows.ids, attention_mask=rows.mask, labels=labels, fused_lm_head=True)


def padded(model: Any, rows: Batch) -> Result:
    def score() -> tuple[torch.Tensor, torch.Tensor]:
        output = padded_output(model, rows)
        return output.log_probs[:, -COLUMNS:], output.entropy[:, -COLUMNS:]

    return with_gradient(model, rows, score)


def shared(model: Any, rows: Batch, mode: str = "on", **options: Any) -> Result:
    def score() -> tuple[torch.Tensor, torch.Tensor]:
        result = SharedPass(mode=mode, **options).score(
            model, rows.ids, rows.mask, COLUMNS, unwrapped=model, compute_entropy=True
        )
        assert result is not None and result.entropies is not None
        return result.logps, result.entropies

    return with_gradient(model, rows, score)


def lengths_of(model: Any) -> list[int]:
    """How many tokens each pass of the model takes from now on."""
    found: list[int] = []
    model.model.register_forward_pre_hook(lambda _, __, kw: found.append(kw["input_ids"].numel()), with_kwargs=True)
    return found


def assert_equal(ours: Result, theirs: Result) -> None:
    assert theirs.gradient.norm() > 0.1, "a comparison of zeros would show nothing"
    torch.testing.assert_close(ours.logps, theirs.logps, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.entropies, theirs.entropies, atol=1e-5, rtol=0)
    assert (ours.gradient - theirs.gradient).norm() < 1e-5 * theirs.gradient.norm()


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Groups of any size, prompts and completions of any length."""
    groups = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4)), min_size=1, max_size=3))
    parts = []
    for number, (prompt, size) in enumerate(groups):
        lengths = draw(st.lists(st.integers(0, COLUMNS), min_size=size, max_size=size))
        parts.append(batch([prompt], size, lengths=lengths, seed=number))
    widest = max(part.ids.shape[1] for part in parts)
    wide = ([F.pad(of, (widest - of.shape[1], 0)) for of in both] for both in zip(*parts, strict=True))
    return Batch(*map(torch.cat, wide))


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8)
@given(rows=batches(), max_tokens=st.sampled_from([None, 60]))
@example(rows=batch([31, 23]), max_tokens=60)
def test_values_and_gradients_are_the_padded_ones(family: str, rows: Batch, max_tokens: int | None) -> None:
    """Whatever the lengths; a model is made once for all of them."""
    assume(rows.mask[:, -COLUMNS:].any())  # a batch with nothing to score has a test of its own
    model = cached(family)
    assert_equal(shared(model, rows, max_tokens=max_tokens), padded(model, rows))


@pytest.mark.parametrize("way", ["flash", "segments"])
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3", "gemma4_images", "qwen3_5"])
def test_values_and_gradients_as_on_gpus_are_the_padded_ones(family: str, way: str) -> None:
    """In several passes, each computed again in the backward pass."""
    model, rows = cached(family), batch([31, 23])
    with attending(way) as asked:
        assert_equal(shared(model, rows, max_tokens=90), padded(model, rows))
    assert len(asked) == (2 if way == "flash" else 0)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["qwen3", *HYBRIDS])
def test_gradient_checkpointing(family: str, reentrant: bool) -> None:
    model, rows = make(family), batch([31, 23], 2)
    expected = padded(model, rows)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    calls = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(model.config._attn_implementation))
    assert_equal(shared(model, rows), expected)
    assert calls == [NAME, NAME], "the layer was not computed again in the backward pass, with the shared attention"
    assert model.config._attn_implementation == "sdpa"


def test_lora_and_its_reference() -> None:
    rows = batch([31, 23])
    model = get_peft_model(make("qwen3"), LoraConfig(target_modules="all-linear", init_lora_weights=False))
    assert_equal(shared(model, rows), padded(model, rows))
    with model.disable_adapter():
        reference = SharedPass(mode="on").score(model, rows.ids, rows.mask, COLUMNS, unwrapped=model)
        output = padded_output(model, rows)
    assert reference is not None
    torch.testing.assert_close(reference.logps, output.log_probs[:, -COLUMNS:], atol=1e-5, rtol=0)


def test_a_batch_with_nothing_to_score_gives_zeros_that_can_be_differentiated() -> None:
    model, rows = make("qwen3"), batch([20], 2, lengths=[0, 0])
    result = shared(model, rows)
    assert not result.logps.any() and not result.gradient.any() and len(result.gradient)


def test_prompts_of_different_groups_share_what_they_have_in_common() -> None:
    """Two questions under one system prompt: the system prompt is computed once."""
    rows = batch([60, 60], 2)
    rows.ids[2:, :40] = rows.ids[:1, :40]
    model = make("qwen3")
    seen = lengths_of(model)
    ours = shared(model, rows)
    n_completion = int(rows.mask[:, 60:].sum())
    # The last token of a prompt stands once per completion: each predicts another first token.
    assert seen == [40 + 19 + 19 + n_completion]
    assert_equal(ours, padded(model, rows))


def test_dropout_is_applied_in_training_and_not_in_evaluation() -> None:
    model, rows = make("qwen3", attention_dropout=0.5), batch([31])
    one, two = (shared(model, rows).logps for _ in range(2))
    assert (one - two).abs().max() > 1e-3
    model.eval()
    assert_equal(shared(model, rows), padded(model, rows))


@pytest.mark.parametrize("way", ["tiles", "flash"])
def test_autocast_in_bf16_is_as_near_to_fp32_as_the_padded_pass(way: str) -> None:
    model, rows = make("qwen3"), batch([31, 23])
    exact = padded(model, rows)
    with torch.autocast("cpu", torch.bfloat16), attending(way):
        ours, theirs = shared(model, rows), padded(model, rows)
    assert ours.logps.dtype == theirs.logps.dtype
    error = (ours.logps - exact.logps).abs().mean()
    assert 1e-5 < error < 2 * (theirs.logps - exact.logps).abs().mean()
    assert (ours.gradient - exact.gradient).norm() < 2 * (theirs.gradient - exact.gradient).norm()


def test_a_long_group_is_cut_and_only_one_pass_is_held_at_a_time() -> None:
    model, rows = make("qwen3"), batch([31], 8, lengths=[20] * 8)
    lengths = lengths_of(model)
    shared(model, rows, max_tokens=80)
    forward, again = lengths[: len(lengths) // 2], lengths[len(lengths) // 2 :]
    assert len(forward) == 4 and max(forward) <= 80
    assert sorted(forward) == sorted(again), "each pass is computed again in the backward pass, none is kept"


def test_the_pass_of_the_old_policy_takes_no_more_tokens_at_a_time_than_the_padded_one() -> None:
    model, rows = make("qwen3"), batch([31, 31, 31, 31], 2)
    lengths = lengths_of(model)
    with torch.no_grad():
        SharedPass().score(model, rows.ids, rows.mask, COLUMNS, unwrapped=model, batch_size=2)
    assert len(lengths) > 1 and max(lengths) <= 2 * rows.ids.shape[1]


def test_what_cannot_be_shared_says_why() -> None:
    both_ways = transformers.Gemma3TextConfig(use_bidirectional_attention=True)
    reasons = {"rotary": transformers.GPT2Config(), "sinks": transformers.GptOssConfig(), "causal": both_ways}
    reasons |= {"caps": transformers.Gemma2Config(), "linear_attention": transformers.OlmoHybridConfig()}
    reasons["hand the layout"] = transformers.NemotronConfig()
    reasons["recurrent"] = transformers.RecurrentGemmaConfig()
    for word, config in reasons.items():
        assert word in (unsupported(config) or ""), config.model_type
    sizes: Any = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 16}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    falcon = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, alibi=False))
    assert "cannot be replaced" in (unsupported_model(falcon) or "")
    with torch.device("meta"):
        model = transformers.GraniteSWAForCausalLM(transformers.GraniteSWAConfig(**sizes))
    assert "sinks" in (unsupported_model(model) or ""), "those of another family too"


def test_auto_falls_back_with_one_line_and_on_refuses(caplog: pytest.LogCaptureFixture) -> None:
    tuning = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2, token_dim=64, num_layers=3)
    model, rows, auto = get_peft_model(make("qwen3"), tuning), batch([31]), SharedPass()
    with caplog.at_level(logging.WARNING):  # seen where nobody has set logging up
        for _ in range(3):
            assert auto.score(model, rows.ids, rows.mask, COLUMNS, unwrapped=model) is None
    assert [record.message.count("before every row") for record in caplog.records if "sharing" in record.message] == [1]
    with pytest.raises(ModelError, match="prefix_sharing"):
        SharedPass(mode="on").score(model, rows.ids, rows.mask, COLUMNS, unwrapped=model)


@pytest.mark.parametrize(
    ("asked", "why"),
    [({"compute_aux_loss": True}, "load-balancing"), ({"pixel_values": torch.ones(1)}, "pixel_values")],
)
def test_what_only_trls_pass_computes_is_left_to_it(
    asked: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, rows = make("qwen3"), batch([31])
    auto = SharedPass()

    def trls(*args: Any, **kwargs: Any) -> Any:
        assert args[0] is model and kwargs.keys() >= asked.keys()
        return "TRL's"

    def scored(shared_pass: SharedPass) -> Any:
        trainer: Any = SimpleNamespace(_shared_pass=shared_pass)
        return TrainerOfTRL._shared_logps(trainer, trls, model, rows.ids, rows.mask, COLUMNS, **asked)

    with caplog.at_level(logging.WARNING):  # seen where nobody has set logging up
        for _ in range(2):
            assert scored(auto) == "TRL's"
    assert [why in record.message for record in caplog.records if "sharing" in record.message] == [True]
    with pytest.raises(ModelError, match=why):
        scored(SharedPass(mode="on"))


@pytest.mark.parametrize(
    ("device", "packed", "padded", "n_passes", "packs"),
    [
        ("cpu", 90, 100, 4, True),
        ("cpu", 91, 100, 1, False),
        ("cuda", 5_904, 10_000, 1, True),
        ("cuda", 905, 5_000, 1, False),
        ("cuda", 5_904, 10_000, 2, False),
        ("mps", 40_000, 48_192, 2, True),
    ],
)
def test_what_auto_packs(device: str, packed: int, padded: int, n_passes: int, packs: bool) -> None:
    assert is_shared(device, packed, padded, n_passes) is packs


def test_padding_alone_is_worth_a_packing() -> None:
    """Rows with nothing in common, of very different lengths."""
    model, rows = make("qwen3"), batch([30, 4], 1, lengths=[20, 2])
    assert_equal(shared(model, rows, mode="auto"), padded(model, rows))


def test_auto_leaves_rows_with_nothing_in_common_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model = make("qwen3")
    alone, auto = batch([30, 30], 1, lengths=[20, 20]), SharedPass()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert auto.score(model, alone.ids, alone.mask, COLUMNS, unwrapped=model) is None
    assert ["too little in common" in record.message for record in caplog.records] == [True]
    together = batch([30], 2, lengths=[20, 20])
    for mode, is_scored in (("auto", True), ("off", False)):
        scored = SharedPass(mode=mode).score(model, together.ids, together.mask, COLUMNS, unwrapped=model)
        assert (scored is not None) is is_scored


def test_a_budget_holds_where_nothing_is_shared_too() -> None:
    """Without it `auto` would run these rows padded, in one pass of 100 tokens."""
    model, rows = make("qwen3"), batch([30, 30], 1, lengths=[20, 20])
    expected, lengths = padded(model, rows), lengths_of(model)
    assert_equal(shared(model, rows, mode="auto", max_tokens=60), expected)
    assert max(lengths) <= 60


def test_a_model_that_drops_the_layout_is_an_error_not_a_wrong_number_and_its_attention_is_put_back() -> None:
    model, rows = make("qwen3"), batch([31])
    with pytest.raises(ModelError, match="prefix_layout"), shared_attention(model.config):
        assert model.config._attn_implementation == NAME
        model(input_ids=rows.ids)
    assert model.config._attn_implementation == "sdpa"
