"""What only the transformers engine promises; the contract that all engines keep is tested in tests/engines/test_engine_contract.py."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from tests.support.model_families import HYBRIDS, tiny_family
from tests.support.sampling import sample_together
from toolgrpo.engines.base import SampleRequest, SamplingOptions
from toolgrpo.engines.decode_batch import DecodeBatch, DecodingRow
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
    first = sample_together(engine, request(seed=1), request(seed=2), request())
    second = sample_together(engine, request(seed=1), request(seed=2), request())
    assert [s.ids for s in first[:2]] == [s.ids for s in second[:2]]
    assert first[0].ids != first[1].ids
    assert first[2].ids != second[2].ids  # unseeded: the engine's stream goes on from rollout to rollout
    assert torch.equal(torch.random.get_rng_state(), state)


def test_rows_with_different_options_share_a_batch(tiny_qwen3: Any) -> None:
    model = tiny_qwen3()
    penalty: dict[str, Any] = {"repetition_penalty": 1.5}
    alone = [
        sample_together(TransformersEngine(lambda: model), request(temperature=0.0, **options))[0]
        for options in ({}, penalty, {})
    ]
    mixed = sample_together(
        TransformersEngine(lambda: model),
        request(temperature=0.0),
        request(temperature=0.0, repetition_penalty=1.5),
        request(temperature=0.0),
        request(temperature=1.0),
    )
    assert [sample.ids for sample in mixed[:3]] == [sample.ids for sample in alone]
    assert len(set(mixed[1].ids)) >= len(set(mixed[0].ids))


@pytest.mark.parametrize(
    ("error", "seen"), [(RuntimeError("out of memory"), EngineError), (TypeError("a bug"), TypeError)]
)
def test_a_failing_forward_pass_reaches_every_request_and_the_next_one_works(
    tiny_qwen3: Any, error: Exception, seen: type[Exception]
) -> None:
    model = tiny_qwen3()
    engine = TransformersEngine(lambda: model)
    failures = [error]

    def fail_once(module: Any, args: Any, kwargs: Any) -> None:
        if failures:
            raise failures.pop()

    model.register_forward_pre_hook(fail_once, with_kwargs=True)

    async def main() -> None:
        await engine.open()
        outcomes = await asyncio.gather(*(engine.sample(request()) for _ in range(3)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [seen] * 3
        assert len((await engine.sample(request())).ids) == 8
        await engine.close()

    asyncio.run(main())


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
    assert TransformersEngine(lambda: model).max_model_len == 1024
    assert TransformersEngine(lambda: model, max_model_len=100).max_model_len == 100
    assert TransformersEngine(lambda: model, max_model_len=9999).max_model_len == 1024


def test_a_model_without_a_key_value_cache_is_refused(tiny_qwen3: Any) -> None:
    from transformers import MambaConfig, MambaForCausalLM

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
