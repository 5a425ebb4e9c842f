"""The same cases over the scripted engine and every one of `ENGINES`; one without a maker here is built as trainings do.

All real ones hold `tiny_qwen3(0)` in fp32, so that what they draw can be checked against the model itself; the
transformers engine decodes tiny hybrids too, whose recurrent layers keep a state.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import PartialState

from tests.engines.conftest import during_a_rollout
from tests.support.model_families import HYBRIDS, tiny_family
from tests.support.sampling import own_logprobs, sample_together
from toolgrpo.engines.base import Engine, FinishReason, Sample, SampleRequest, SamplingOptions
from toolgrpo.engines.build import ENGINES, EngineOptions, build_engine
from toolgrpo.errors import EngineError
from toolgrpo.evaluation.run import policy_of_model
from toolgrpo.testing import ScriptedEngine

pytestmark = [pytest.mark.contract, pytest.mark.timeout(1200)]
MAX_MODEL_LEN = 512
GREEDY = SamplingOptions(temperature=0.0)
VOCABULARY = 320


@dataclasses.dataclass(frozen=True)
class Subject:
    engine: Engine
    model: Any  # what it draws from; None for the scripted one
    open_requests: Callable[[], int] | None  # as the thing that decodes sees them; None where only a server knows
    another: Callable[[], Any] | None = None  # a model with other weights; None: `tiny_qwen3(1)`


def _scripted(request: pytest.FixtureRequest) -> Iterator[Subject]:
    def script(asked: SampleRequest, number: int) -> list[int]:
        return [(sum(asked.ids) * 31 + 7 * n) % VOCABULARY for n in range(asked.max_tokens)]

    engine = ScriptedEngine(script, max_model_len=MAX_MODEL_LEN, step_s=0.004)
    yield Subject(engine, None, lambda: engine.open_requests)


def _hybrid(request: pytest.FixtureRequest, family: str) -> Iterator[Subject]:
    from toolgrpo.engines.transformers import TransformersEngine

    model = tiny_family(family).to("cuda" if torch.cuda.is_available() else "cpu")
    engine = TransformersEngine(lambda: model, max_model_len=MAX_MODEL_LEN)

    def open_requests() -> int:
        return 0 if engine._loop is None else len(engine._loop._batch)

    model.config.eos_token_id = sample_together(engine, ask())[0].ids[4]  # drawn greedily, and no stop token for that
    yield Subject(engine, model, open_requests, lambda: tiny_family(family, seed=1))


def _listed(request: pytest.FixtureRequest, name: str) -> Iterator[Subject]:
    model = request.getfixturevalue("tiny_qwen3")(0)
    options = EngineOptions(engine=name, max_model_len=MAX_MODEL_LEN)
    engine: Any = build_engine(policy_of_model(model, PartialState()), options).engine
    yield Subject(engine, model, (lambda: int(engine._vllm.has_work)) if name == "vllm_colocate" else None)
    engine.shutdown()


def _vllm_server(request: pytest.FixtureRequest) -> Iterator[Subject]:
    from tests.support.server_engine import engine_of
    from toolgrpo.engines.server_weights import DiskWeights

    url = request.getfixturevalue("vllm_server").url
    folder = request.getfixturevalue("tmp_path_factory").mktemp("weights")
    engine = engine_of(url, weights=DiskWeights(folder))
    yield Subject(engine, request.getfixturevalue("tiny_qwen3")(0), None)
    engine.shutdown()


MAKERS: dict[str, Callable[[pytest.FixtureRequest], Iterator[Subject]]] = {
    "scripted": _scripted,
    **{f"transformers {family}": functools.partial(_hybrid, family=family) for family in HYBRIDS},
    "vllm_server": _vllm_server,
}
REAL = [
    *(pytest.param(name, marks=[pytest.mark.vllm] * name.startswith("vllm")) for name in ENGINES),
    *(f"transformers {family}" for family in HYBRIDS[:3]),
    *(pytest.param(f"transformers {family}", marks=pytest.mark.slow) for family in HYBRIDS[3:]),
]


@pytest.fixture(scope="module")
def subjects(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Subject]]:
    """Each engine is started once, when it is first asked for."""
    running: dict[str, tuple[Subject, Iterator[Subject]]] = {}

    def get(name: str) -> Subject:
        if name not in running:
            if name.startswith("vllm"):
                pytest.importorskip("vllm", reason="vLLM is not installed")
            maker = MAKERS[name](request) if name in MAKERS else _listed(request, name)
            subject = next(maker)
            if subject.model is not None:
                subject.engine.load_weights(subject.model.named_parameters())
            running[name] = subject, maker
        return running[name][0]

    yield get
    for _, maker in running.values():
        assert next(maker, None) is None  # runs what stands after its yield


@pytest.fixture(params=["scripted", *REAL])
def subject(request: pytest.FixtureRequest, subjects: Callable[[str], Subject]) -> Subject:
    return subjects(request.param)


@pytest.fixture(params=REAL)
def real(request: pytest.FixtureRequest, subjects: Callable[[str], Subject]) -> Subject:
    return subjects(request.param)


def ask(ids: Any = (11, 12, 13), max_tokens: int = 12, options: SamplingOptions = GREEDY, **more: Any) -> SampleRequest:
    return SampleRequest(ids, max_tokens, options=options, **{"stop_ids": (), **more})


# What comes back


def test_a_sample_has_as_many_logprobs_as_ids_and_ends_at_max_tokens(subject: Subject) -> None:
    given = [5]
    samples = sample_together(subject.engine, ask(), ask(max_tokens=1), ask(ids=given), ask(ids=given))
    for sample in samples:
        assert sample.finish_reason is FinishReason.LENGTH
        assert subject.engine.gives_logprobs and sample.logprobs is not None
        assert len(sample.logprobs) == len(sample.ids)
        assert all(isinstance(token, int) and 0 <= token < VOCABULARY for token in sample.ids)
        assert all(logprob <= 0 for logprob in sample.logprobs)
    assert [len(sample.ids) for sample in samples] == [12, 1, 12, 12]
    assert given == [5], "the request is not changed"


def test_a_stop_token_ends_the_sample_and_is_its_last(subject: Subject) -> None:
    (free,) = sample_together(subject.engine, ask())
    stop = free.ids[4]
    at = free.ids.index(stop)
    stopped, at_the_limit, too_short, stop_in_the_prompt = sample_together(
        subject.engine,
        ask(stop_ids=(stop, VOCABULARY - 1)),
        ask(stop_ids=(stop,), max_tokens=at + 1),
        ask(stop_ids=(stop,), max_tokens=at) if at else ask(max_tokens=1),
        ask(stop_ids=tuple(token for token in ask().ids if token not in free.ids)),
    )
    assert (stopped.ids, stopped.finish_reason) == (free.ids[: at + 1], FinishReason.STOP)
    assert stopped.logprobs is not None and len(stopped.logprobs) == at + 1
    assert (at_the_limit.ids, at_the_limit.finish_reason) == (free.ids[: at + 1], FinishReason.STOP)
    assert too_short.finish_reason is FinishReason.LENGTH
    assert stop_in_the_prompt.ids == free.ids


def test_only_the_stop_tokens_of_the_request_stop_it(real: Subject) -> None:
    """What the model's config calls its end of sequence is drawn, and decoding goes on."""
    (sample,) = sample_together(real.engine, ask())
    assert real.model.config.eos_token_id in sample.ids[:-1]


def test_greedy_is_the_same_alone_and_in_company(subject: Subject) -> None:
    (alone,) = sample_together(subject.engine, ask())
    others = [ask(ids=list(range(1, 2 + 7 * n)), max_tokens=3 + 5 * n) for n in range(6)]
    assert sample_together(subject.engine, ask(), *others)[0].ids == alone.ids
    assert sample_together(subject.engine, *others, ask())[-1].ids == alone.ids


def test_a_seed_makes_a_draw_repeatable_and_requests_without_one_differ(real: Subject) -> None:
    hot = SamplingOptions(temperature=2.0)
    first, again = (
        sample_together(real.engine, *(ask(options=hot, seed=seed) for seed in (1, 2, *[None] * 8))) for _ in range(2)
    )
    assert [sample.ids for sample in first[:2]] == [sample.ids for sample in again[:2]]
    assert first[0].ids != first[1].ids
    assert len({sample.ids for sample in first[2:]}) >= 6


# Log-probabilities and weights


def test_what_a_reward_seeds_does_not_repeat_draws(real: Subject) -> None:
    drawn, hot = [], SamplingOptions(temperature=2.0)
    for _ in range(3):
        drawn.append(
            [one.ids for one in sample_together(real.engine, *[ask(max_tokens=12, options=hot) for _ in range(4)])]
        )
        torch.manual_seed(0)
    assert drawn[1] != drawn[2]


def test_logprobs_are_the_trainers_over_ten_thousand_tokens_of_many_turns(real: Subject) -> None:
    rng = random.Random(0)

    async def episode(number: int) -> list[tuple[SampleRequest, Sample]]:
        options = SamplingOptions(temperature=(1.0, 0.7, 1.3)[number % 3])
        ids, turns = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 60))], []
        for _ in range(4):
            request = ask(ids=tuple(ids), max_tokens=80, stop_ids=(3,), options=options)
            turns.append((request, await real.engine.sample(request)))
            ids += [*turns[-1][1].ids, *(rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 25)))]
        return turns

    async def work() -> list[list[tuple[SampleRequest, Sample]]]:
        return list(await asyncio.gather(*(episode(number) for number in range(48))))

    n_tokens, worst = 0, 0.0
    for request, sample in (turn for turns in during_a_rollout(real.engine, work) for turn in turns):
        expected = own_logprobs(real.model, request, sample)
        worst = max(worst, *(abs(a - b) for a, b in zip(sample.logprobs or (), expected, strict=True)))
        n_tokens += len(sample.ids)
    assert n_tokens >= 10_000
    if torch.cuda.is_available() and worst >= 1e-4 and real.model.config.model_type == "nemotron_h":
        pytest.xfail(f"an H100 differed by 2.1 here, and nobody knows why (docs/how-to/engines.md); now by {worst:.2g}")
    assert worst < 1e-4


@pytest.mark.parametrize(
    "options",
    [
        GREEDY,
        SamplingOptions(top_k=5),
        SamplingOptions(top_p=0.8),
        SamplingOptions(min_p=0.1, temperature=1.5),
        SamplingOptions(repetition_penalty=1.3),
        SamplingOptions(temperature=0.8, top_k=20, top_p=0.9, min_p=0.05),
    ],
    ids=repr,
)
def test_logprobs_are_those_of_the_distribution_drawn_from(real: Subject, options: SamplingOptions) -> None:
    on_gpu = torch.cuda.is_available() and "VLLM" in type(real.engine).__name__
    requests = [ask(ids=[n + 1, 2, 3], max_tokens=20, options=options) for n in range(8)]
    for request, sample in zip(requests, sample_together(real.engine, *requests), strict=True):
        expected = pytest.approx(own_logprobs(real.model, request, sample), abs=1e-4)
        if on_gpu and options.min_p and options.top_k and sample.logprobs != expected:
            pytest.xfail("vLLM 0.32's kernel for GPUs keeps too few tokens after min_p (docs/how-to/engines.md)")
        assert sample.logprobs == expected


def test_new_weights_take_effect_and_no_prefix_of_the_old_ones_is_left(real: Subject, tiny_qwen3: Any) -> None:
    request = ask(ids=list(range(100)), max_tokens=40)
    (before,) = sample_together(real.engine, request)
    own = {name: parameter.detach().clone() for name, parameter in real.model.named_parameters()}
    other = dict((real.another or functools.partial(tiny_qwen3, 1))().named_parameters())
    try:
        replace_weights(real, other)
        (after,) = sample_together(real.engine, request)
        assert after.ids != before.ids
        assert after.logprobs == pytest.approx(own_logprobs(real.model, request, after), abs=1e-4)
    finally:
        replace_weights(real, own)
    (again,) = sample_together(real.engine, request)
    assert again.ids == before.ids
    assert again.logprobs == pytest.approx(before.logprobs, abs=1e-4)


def replace_weights(subject: Subject, weights: dict[str, torch.Tensor]) -> None:
    """As in training: the trainer's model changes, then the engine is told."""
    with torch.no_grad():
        for name, parameter in subject.model.named_parameters():
            parameter.copy_(weights[name])
    subject.engine.load_weights(subject.model.named_parameters())


# Joining, leaving, limits

MANY = 32
TRIES = 5  # where the machine halts this process for a while, it sees all answers of a server at once


async def started(engine: Engine, requests: list[SampleRequest]) -> list[asyncio.Task[Sample]]:
    """Requests that the engine has begun to decode: it has answered one of a single token that came after them."""
    tasks = [asyncio.create_task(engine.sample(request)) for request in requests]
    await asyncio.sleep(0)  # each is handed over before the one of a single token
    await engine.sample(ask(ids=[9, 9], max_tokens=1))
    return tasks


def test_a_short_request_joins_running_long_ones_and_ends_before_them(subject: Subject) -> None:
    """With so many long ones that decoding them takes hundreds of times longer: a barrier answers the short one last."""

    async def all_ended_first() -> bool:
        long = await started(subject.engine, [ask(ids=[n + 1], max_tokens=450) for n in range(MANY)])
        ended = all(task.done() for task in long)
        assert [len(sample.ids) for sample in await asyncio.gather(*long)] == [450] * MANY
        return ended

    assert not all(during_a_rollout(subject.engine, all_ended_first) for _ in range(TRIES))


def test_a_cancelled_request_leaves_the_engine_and_its_siblings_go_on(subject: Subject) -> None:
    async def work() -> Sample | None:
        long = [ask(ids=[n + 1], max_tokens=500) for n in range(MANY)]
        *doomed, sibling = await started(subject.engine, [*long, ask(max_tokens=30)])
        cancelled = [task for task in doomed if task.cancel()]
        outcomes = await asyncio.gather(*cancelled, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} <= {asyncio.CancelledError}
        sample = await sibling
        await subject.engine.sample(ask(ids=[8], max_tokens=40))  # the doomed ones would still be decoding after it
        if subject.open_requests is not None:  # that a server aborts them is shown in tests/e2e
            assert subject.open_requests() == 0
        return sample if cancelled else None

    sibling = next(filter(None, (during_a_rollout(subject.engine, work) for _ in range(TRIES))), None)
    assert sibling, "all had ended before the one of a single token"
    assert sibling.ids == sample_together(subject.engine, ask(max_tokens=30))[0].ids


def test_closing_fails_what_is_open_and_leaves_nothing(subject: Subject) -> None:
    async def main() -> list[Any]:
        await subject.engine.open()
        tasks = await started(subject.engine, [ask(ids=[n + 1], max_tokens=500) for n in range(MANY)])
        still_open = [task for task in tasks if not task.done()]
        await subject.engine.close()
        async with asyncio.timeout(200):
            return await asyncio.gather(*still_open, return_exceptions=True)

    tries = (asyncio.run(main()) for _ in range(TRIES))
    outcomes = next((some for some in tries if any(isinstance(one, EngineError) for one in some)), [])
    assert outcomes, "all had ended before the engine was closed"
    assert {type(outcome) for outcome in outcomes} <= {EngineError, Sample}  # answers may have been on their way
    assert {len(outcome.ids) for outcome in outcomes if isinstance(outcome, Sample)} <= {500}
    if subject.open_requests is not None:
        assert subject.open_requests() == 0
    assert len(sample_together(subject.engine, ask())[0].ids) == 12


def test_the_context_window_can_be_filled_and_what_is_impossible_is_refused(subject: Subject) -> None:
    engine = subject.engine
    assert engine.max_model_len == MAX_MODEL_LEN
    (sample,) = sample_together(engine, ask(ids=[5] * (MAX_MODEL_LEN - 4), max_tokens=4))
    assert len(sample.ids) == 4
    for too_long in (ask(ids=[5] * (MAX_MODEL_LEN - 4), max_tokens=5), ask(ids=[5] * MAX_MODEL_LEN, max_tokens=1)):
        with pytest.raises(EngineError, match="512"):
            sample_together(engine, too_long)
    for impossible in (ask(ids=[]), ask(max_tokens=0)):
        with pytest.raises(EngineError):
            sample_together(engine, impossible)


def test_an_engine_that_is_not_open_says_so_and_one_is_opened_once(subject: Subject) -> None:
    with pytest.raises(EngineError):
        asyncio.run(subject.engine.sample(ask()))

    async def work() -> None:
        with pytest.raises(EngineError, match="already open"):
            await subject.engine.open()

    during_a_rollout(subject.engine, work)
    asyncio.run(subject.engine.close())  # closing twice does no harm
