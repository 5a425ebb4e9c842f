"""Parts of `gpu_proof.py` about the prefix-shared training pass: exact, how fast, and beside FlexAttention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from _gpu_place import Figure, Place, model_of_shape, seconds_of
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from training_pass import Case, batch_of, build
from trl.trainer.utils import add_fused_lm_head

from toolgrpo.shared_pass.attention import PrefixLayout, attend
from toolgrpo.shared_pass.packing import PackedSegment, pack, rows_of_batch
from toolgrpo.shared_pass.scoring import SharedPass
from toolgrpo.trainer.trl.trainer import tune_fused_head

SIZES = ((1200, 200, 8), (2600, 500, 8), (400, 400, 8), (200, 1000, 8), (20, 300, 8))  # prompt, completion, group
TINY_SIZES = ((120, 20, 4),)
WAYS = ("padded", "shared")
ROUNDING = 1e-4  # of log-probabilities in fp32, by other kernels in another order
Scores = tuple[torch.Tensor, torch.Tensor]  # log-probabilities, gradient


def exactness(place: Place) -> Iterator[Figure]:
    """Log-probabilities and gradients of the shared pass beside the padded one's, in fp32 and in bf16."""
    torch.backends.cuda.matmul.allow_tf32 = False
    for family in ("qwen2", "gemma3"):  # the second has a sliding window, which is masked
        model, ids, mask = _small(family, place)
        exact, ours = _scored(model, ids, mask, "padded"), _scored(model, ids, mask, "shared")
        yield Figure(f"{family}, fp32: log-probabilities differ by", _apart(ours[0], exact[0]), at_most=ROUNDING)
        relative = float((ours[1] - exact[1]).norm() / exact[1].norm())
        yield Figure(f"{family}, fp32: gradients differ by, of their norm", relative, at_most=ROUNDING)
        with torch.autocast(place.device, torch.bfloat16):
            rough, rough_ours = _scored(model, ids, mask, "padded"), _scored(model, ids, mask, "shared")
        times = float((rough_ours[0] - exact[0]).abs().mean() / (rough[0] - exact[0]).abs().mean())
        yield Figure(f"{family}, bf16: as far from fp32 as the padded pass, times", times, at_most=2.0)
        times = float((rough_ours[1] - exact[1]).norm() / (rough[1] - exact[1]).norm())
        yield Figure(f"{family}, bf16: gradients, times", times, at_most=2.0)


def speed(place: Place, *, whole: bool = False) -> Iterator[Figure]:
    """Forward and backward, padded (TRL's) and shared, in bf16; what is packed tells where sharing begins to pay.

    `whole`: of a 1.5B shape with gradient checkpointing.
    """
    tune_fused_head(torch.device(place.device))
    width, layers, rounds = (64, 2, 1) if place.tiny else (1024, 12, 5)
    large: Any = _large(place) if whole else None
    for prompt, completion, group in TINY_SIZES if place.tiny else SIZES:
        for lengths in ("full", "spread"):
            size = f"prompt {prompt}, {group} x {completion} {lengths}"
            last = f"{size}: its host calls, of the padded pass's"
            if last in place.known:
                continue
            case = Case(prompt, completion, group, lengths, width, layers, large.config.vocab_size if whole else 8000)
            model, ids, mask = (large, *batch_of(case)) if whole else build(case)
            model, ids, mask = model.to(place.device), ids.to(place.device), mask.to(place.device)
            packed = pack(rows_of_batch(ids, mask, _labelled(mask, completion))).n_tokens / ids.numel()
            with torch.autocast(place.device, torch.bfloat16):
                work = {way: functools.partial(one_pass, way, model, ids, mask, completion) for way in WAYS}
                took = {way: seconds_of(place, work[way], rounds) for way in work}
                asked = {way: host_calls(work[way]) for way in work}
            yield Figure(f"{size}: packed tokens, of the padded", packed)
            yield Figure(f"{size}: padded", 1000 * took["padded"], "ms")
            yield Figure(f"{size}: shared is faster, times", took["padded"] / took["shared"])
            yield Figure(last, asked["shared"] / asked["padded"])


def kept(place: Place) -> Iterator[Figure]:
    """A pass of the financial recipe's sizes without gradient checkpointing, and with it."""
    prompt, completion, rows, rounds = (120, 20, 4, 1) if place.tiny else (2680, 208, 16, 5)
    model = _large(place, "0.5B")
    case = Case(prompt, completion, rows, "full", 0, 0, model.config.vocab_size)
    ids, mask = (one.to(place.device) for one in batch_of(case))
    ids[rows // 2 :, :prompt] = ids[rows // 2, :prompt].flip(0)  # two groups
    tune_fused_head(torch.device(place.device))
    took = []
    for what in ("recomputed", "kept"):
        if what == "kept":
            model.gradient_checkpointing_disable()
        if place.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        took.append(seconds_of(place, functools.partial(one_pass, "shared", model, ids, mask, completion), rounds))
        yield Figure(f"activations {what}: a pass", 1000 * took[-1], "ms")
        if place.device == "cuda":
            yield Figure(
                f"activations {what}: peak of PyTorch's memory", torch.cuda.max_memory_allocated() / 2**30, "GiB"
            )
    yield Figure("kept is faster, times", took[0] / took[1])


def flex(place: Place) -> Iterator[Figure]:
    """One layer's attention over a packed group: what runs, and FlexAttention (on a CPU not compiled, forward only)."""
    heads, key_heads, width, rounds = (4, 2, 16, 1) if place.tiny else (16, 8, 128, 10)
    dtype = torch.float32 if place.device == "cpu" else torch.bfloat16
    with_backward = place.device != "cpu"
    flexed = torch.compile(flex_attention) if with_backward else flex_attention
    for prompt, completion, group in TINY_SIZES if place.tiny else SIZES:
        ids = torch.randint(0, 8000, (group, prompt + completion), generator=torch.Generator().manual_seed(1))
        ids[:, :prompt] = ids[0, :prompt].clone()
        mask = torch.ones_like(ids)
        packing = pack(rows_of_batch(ids, mask, _labelled(mask, completion)))
        generator = torch.Generator(place.device).manual_seed(2)
        query, key, value = (
            torch.randn(1, n, packing.n_tokens, width, generator=generator, device=place.device, dtype=dtype)
            .requires_grad_(with_backward)
            for n in (heads, key_heads, key_heads)
        )  # fmt: skip
        layout = PrefixLayout(packing.segments)
        blocks = _visible_blocks(packing.segments, packing.n_tokens, place.device)

        def ours(query: Any = query, key: Any = key, value: Any = value, layout: Any = layout) -> torch.Tensor:
            return attend(torch.nn.Module(), query, key, value, None, prefix_layout=layout)[0]

        def theirs(query: Any = query, key: Any = key, value: Any = value, blocks: Any = blocks) -> torch.Tensor:
            answer: Any = flexed(query, key, value, block_mask=blocks, enable_gqa=True)
            return torch.as_tensor(answer).transpose(1, 2)

        size = f"prompt {prompt}, {group} x {completion}"
        apart = _apart(ours().float(), theirs().float())
        yield Figure(f"{size}: answers differ by", apart, at_most=ROUNDING if dtype == torch.float32 else 0.05)
        took = [
            seconds_of(place, (lambda way=way: way().float().sum().backward()) if with_backward else way, rounds)  # type: ignore[misc]
            for way in (ours, theirs)
        ]
        yield Figure(f"{size}: what runs", 1000 * took[0], "ms")
        yield Figure(f"{size}: FlexAttention is faster, times", took[0] / took[1])


def _visible_blocks(segments: tuple[PackedSegment, ...], n_tokens: int, device: str) -> Any:
    """Return FlexAttention's mask of a packed tree: a token sees its segment causally, and all of its ancestors."""
    number = {(segment.start, segment.end): place for place, segment in enumerate(segments)}
    of_token = torch.zeros(n_tokens, dtype=torch.long)
    sees = torch.eye(len(segments), dtype=torch.bool)
    for place, segment in enumerate(segments):
        of_token[segment.start : segment.end] = place
        sees[place, [number[span] for span in segment.ancestors]] = True
    of_token, sees = of_token.to(device), sees.to(device)

    def visible(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return sees[of_token[query], of_token[key]] & (key <= query)  # ancestors stand before

    return create_block_mask(visible, None, None, n_tokens, n_tokens, device=device)


def _large(place: Place, shape: str = "1.5B") -> Any:
    model = model_of_shape(place, torch.bfloat16, shape).train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _small(family: str, place: Place) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return a model of three layers, and two groups of four completions of different lengths."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": 997, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "tie_word_embeddings": True,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    model: Any
    if family == "gemma3":
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        config = transformers.Gemma3TextConfig(**shape, head_dim=32, sliding_window=40, layer_types=kinds)
        model = transformers.Gemma3ForCausalLM(config)
    else:
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape))
    model = model.float().train().to(place.device)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    ids = torch.randint(0, 997, (8, 150), generator=torch.Generator().manual_seed(3))
    ids[:4, :100], ids[4:, :100] = ids[0, :100].clone(), ids[4, :100].clone()
    mask = torch.ones_like(ids)
    for row, length in enumerate((50, 30, 7, 1, 50, 44, 20, 12)):
        mask[row, 100 + length :] = 0
    return model, ids.to(place.device), mask.to(place.device)


def _scored(model: Any, ids: torch.Tensor, mask: torch.Tensor, way: str) -> Scores:
    model.zero_grad()
    logps = _logps(way, model, ids, mask, 50)
    real = mask[:, -50:].float()
    (logps * real).sum().backward()  # type: ignore[no-untyped-call]
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    return (logps * real).detach().float(), gradient.float()


def _logps(way: str, model: Any, ids: torch.Tensor, mask: torch.Tensor, completion: int) -> torch.Tensor:
    """Return the log-probabilities of completions, by TRL's padded pass or by the shared one, whatever it gains."""
    if way == "shared":
        scored = SharedPass(mode="on").score(model, ids, mask, completion, unwrapped=model, compute_entropy=True)
        assert scored is not None
        return scored.logps
    labels = ids.masked_fill(_labelled(mask, completion) == 0, -100)
    output = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    return torch.as_tensor(output.log_probs[:, -completion:])


def _labelled(mask: torch.Tensor, completion: int) -> torch.Tensor:
    labelled = mask.clone()
    labelled[:, :-completion] = 0
    return labelled


def one_pass(way: str, model: Any, ids: torch.Tensor, mask: torch.Tensor, completion: int) -> None:
    model.zero_grad()
    _logps(way, model, ids, mask, completion).sum().backward()  # type: ignore[no-untyped-call]


def host_calls(work: Callable[[], object]) -> int:
    """Count what PyTorch is asked for; a call of attention is one, whatever it asks for itself."""
    work()  # what is made on first use
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        work()

    def is_in_attention(event: Any) -> bool:
        return event is not None and ("attention" in event.name or is_in_attention(event.cpu_parent))

    return sum(event.name.startswith("aten::") and not is_in_attention(event.cpu_parent) for event in seen.events())


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max().detach())
