"""What only the transformers engine promises, and drawing from logits; the contract of all engines: test_engine_contract.py."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from tests.engines.conftest import during_a_rollout
from tests.support.model_families import HYBRIDS, tiny_family
from tests.support.sampling import sample_together
from toolgrpo.engines.base import SampleRequest, SamplingOptions
from toolgrpo.engines.decode_batch import DecodeBatch, DecodingRow, draw, processed_logprobs
from toolgrpo.engines.transformers import TransformersEngine
from toolgrpo.errors import EngineError, ModelError


def request(n_prompt: int = 5, max_tokens: int = 8, **options: Any) -> SampleRequest:
    seed = options.pop("seed", None)
    ids = [(7 * i) % 300 for i in range(n_prompt)]
    return SampleRequest(ids=ids, max_tokens=max_tokens, stop_ids=(), options=SamplingOptions(**options), seed=seed)


def test_a_full_batch_makes_others_wait_but_changes_nothing(tiny_qwen3: Any) -> None:
    model = tiny_qwen3()
    rng = random.Random(0)
    requests = [request(rng.randrange(1, 90), rng.randrange(1, 40), temperature=0.0) for _ in range(24)]
    together = sample_together(TransformersEngine(lambda: model), *requests)
    narrow = sample_together(TransformersEngine(lambda: model, max_rows=3), *requests)
    assert [sample.ids for sample in narrow] == [sample.ids for sample in together]
    for one, other in zip(narrow, together, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_every_module_is_put_back_in_its_own_mode(tiny_qwen3: Any) -> None:
    model = tiny_qwen3().train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    modes_while_open = []
    model.register_forward_pre_hook(lambda module, args: modes_while_open.append(module.training))
    sample_together(TransformersEngine(lambda: model), request())
    assert not any(modes_while_open)
    assert [module.training for module in model.modules()] == before


def test_seeds_make_draws_repeatable_and_the_trainers_own_randomness_is_left_alone(tiny_qwen3: Any) -> None:
    model = tiny_qwen3()
    engine = TransformersEngine(lambda: model)
    state = torch.random.get_rng_state()
    first, second = (sample_together(engine, request(seed=1), request()) for _ in range(2))
    assert first[0].ids == second[0].ids
    assert first[1].ids != second[1].ids  # unseeded: the engine's stream goes on from rollout to rollout
    assert torch.equal(torch.random.get_rng_state(), state)


def test_rows_with_different_options_share_a_batch(tiny_qwen3: Any) -> None:
    model = tiny_qwen3()
    greedy = [request(temperature=0.0, repetition_penalty=penalty) for penalty in (1.0, 1.5, 1.0)]
    alone = [sample_together(TransformersEngine(lambda: model), one)[0] for one in greedy]
    mixed = sample_together(TransformersEngine(lambda: model), *greedy, request(temperature=1.0))
    assert [sample.ids for sample in mixed[:3]] == [sample.ids for sample in alone]
    assert len(set(mixed[1].ids)) >= len(set(mixed[0].ids))


@pytest.mark.parametrize(
    ("error", "seen"), [(RuntimeError("out of memory"), EngineError), (TypeError("a bug"), TypeError)]
)
def test_a_failing_pass_reaches_every_request_and_no_other(
    tiny_qwen3: Any, error: Exception, seen: type[Exception]
) -> None:
    model = tiny_qwen3()
    engine = TransformersEngine(lambda: model)
    failures = [error]

    def fail_once(module: Any, args: Any, kwargs: Any) -> None:
        if failures:
            raise failures.pop()

    model.register_forward_pre_hook(fail_once, with_kwargs=True)

    async def work() -> None:
        outcomes = await asyncio.gather(*(engine.sample(request()) for _ in range(3)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [seen] * 3
        assert len((await engine.sample(request())).ids) == 8

    during_a_rollout(engine, work)


def states_of_last_row(batch: DecodeBatch, n_ids: int) -> list[torch.Tensor]:
    """Return keys and values of its tokens, and the states of its recurrent and convolution layers."""
    found = []
    for layer in batch._cache.layers:
        if isinstance(layer, DynamicLayer):
            found += [layer.keys[-1, :, 1 - n_ids :], layer.values[-1, :, 1 - n_ids :]]
        if isinstance(layer, LinearAttentionLayer):
            states = [*layer.conv_states.values(), *layer.recurrent_states.values()]
            found += [state[-1] for state in states if state is not None]
    return found


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_turn_after_a_tool_result_has_the_state_of_a_fresh_prefill(family: str) -> None:
    """It joins again while longer rows decode, one of which leaves."""
    model = tiny_family(family)

    def row(ids: list[int], max_tokens: int) -> DecodingRow:
        asked = SampleRequest(ids=ids, max_tokens=max_tokens, stop_ids=(), options=SamplingOptions(temperature=0.0))
        return DecodingRow(asked, torch.Generator())

    together, alone = DecodeBatch(model, max_rows=4), DecodeBatch(model, max_rows=4)
    call, *others = row([5, 6, 7], 6), row(list(range(60)), 40), row(list(range(9, 90)), 40)
    together.join([*others, call])
    while call.finish_reason is None:
        together.step()
    turn, again = (row([*call.ids, *range(200, 217)], 8) for _ in range(2))
    together.join([turn])
    alone.join([again])
    for n_steps in (1, 3):  # right after the result was read, and some tokens later
        for _ in range(n_steps):
            together.step()
            alone.step()
        assert turn.ids == again.ids
        pairs = zip(*(states_of_last_row(batch, len(turn.ids)) for batch in (together, alone)), strict=True)
        for number, (ours, fresh) in enumerate(pairs):
            assert fresh.norm() > 0, number
            torch.testing.assert_close(ours, fresh, atol=1e-4, rtol=1e-4)
        together.leave(others[:1])


def test_the_context_window_is_the_models_or_the_smaller_one_asked_for(tiny_qwen3: Any) -> None:
    model = tiny_qwen3()
    windows = [TransformersEngine(lambda: model, max_model_len=asked).max_model_len for asked in (None, 100, 9999)]
    assert windows == [1024, 100, 1024]


def test_a_model_without_a_key_value_cache_is_refused() -> None:
    config = MambaConfig(vocab_size=300, hidden_size=16, state_size=4, num_hidden_layers=1)
    with pytest.raises(ModelError, match="how many positions"):
        TransformersEngine(lambda: MambaForCausalLM(config))
    with pytest.raises(ModelError, match=r"1.*MambaForCausalLM"):
        TransformersEngine(lambda: MambaForCausalLM(config), max_model_len=64)


def test_a_model_of_no_numbers_is_said_instead_of_trained_on(tiny_qwen3: Any) -> None:
    model = tiny_qwen3(0)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(EngineError, match=r"token_logprobs\[0\]"):
        sample_together(TransformersEngine(lambda: model), request())


# Drawing: what can be drawn, and that its log-probability is that of the distribution drawn from

PROBS = torch.tensor([0.5, 0.25, 0.15, 0.1])
LOGITS = PROBS.log().unsqueeze(0) + 3.0  # logits are only known up to a constant


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"temperature": 0.5}, [p * p / 0.345 for p in (0.5, 0.25, 0.15, 0.1)]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 9}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_p": 0.7}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.4}, [1, 0, 0, 0]),
        ({"min_p": 0.25}, [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
        ({"top_k": 3, "top_p": 0.8}, [2 / 3, 1 / 3, 0, 0]),  # of what top_k left, 0.83 is more than 0.8
        ({"temperature": 0.0}, [0.5, 0.25, 0.15, 0.1]),  # greedy is not scaled
    ],
)
def test_what_is_left_to_draw_from(options: dict[str, Any], expected: list[float]) -> None:
    left = processed_logprobs(LOGITS, SamplingOptions(**options), [[]]).exp()[0].tolist()
    assert left == pytest.approx(expected, abs=1e-6)


def test_the_repetition_penalty_hits_seen_tokens_of_the_row_only() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0], [2.0, -2.0, 1.0]])
    logprobs = processed_logprobs(logits, SamplingOptions(repetition_penalty=2.0), [[0, 1, 1], []])
    expected = torch.tensor([[1.0, -4.0, 1.0], [2.0, -2.0, 1.0]]).log_softmax(-1)
    assert torch.allclose(logprobs, expected)


def test_greedy_takes_the_most_likely_token_and_a_draw_follows_the_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    n = 20_000
    greedy = draw(LOGITS, SamplingOptions(temperature=0.0), [[]], [generator])
    assert greedy.tokens == [0]
    assert greedy.logprobs == pytest.approx([math.log(0.5)])
    drawn = draw(LOGITS.expand(n, -1), SamplingOptions(top_k=3), [[]] * n, [generator] * n)
    counts = torch.bincount(torch.tensor(drawn.tokens), minlength=4) / n
    assert counts.tolist() == pytest.approx([0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0], abs=0.015)
    assert drawn.logprobs[:50] == pytest.approx([math.log(PROBS[t].item() / 0.9) for t in drawn.tokens[:50]])


def test_low_precision_logits_are_drawn_from_in_fp32() -> None:
    drawn = draw(LOGITS.bfloat16(), SamplingOptions(temperature=0.0), [[]], [torch.Generator()])
    expected = LOGITS.bfloat16().float().log_softmax(-1)[0, 0].item()
    assert drawn.logprobs == [expected]
