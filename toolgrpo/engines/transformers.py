"""Generation on the trainer's own model: no vLLM needed, and no weights to copy.

Requests join and leave between any two tokens (`wave.py`), as in vLLM, so no trajectory waits for a slower one. The forward
passes run in one thread of their own; the event loop only hands rows over between two steps.

Invariants: every `sample` gets a `Sample`, an error or a cancellation; a cancelled row leaves the batch before the next
step; after `close` there is no row, no cache and no thread, and each module is in the mode (train or eval) it was in.

Not covered: parameters split over processes (DeepSpeed ZeRO-3, FSDP): every process would have to take the same number of
steps, so `open` refuses them, and the trainer uses `ReplicaEngine`. Prefixes are not cached: each turn reads its whole prompt again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from toolgrpo.engines.base import Sample, SampleRequest
from toolgrpo.engines.checks import BadAnswer, check_request, checked_sample
from toolgrpo.engines.decode_batch import Row, Wave
from toolgrpo.errors import ConfigError, EngineError, ModelError

__all__ = ["TransformersEngine", "TransformersOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersOptions:
    """What a user can ask of this engine. Each process adds its number to the seed."""

    max_model_len: int | None = None
    max_rows: int = 64
    seed: int = 0


class TransformersEngine:
    """The `transformers` engine. `model` yields the unwrapped model, whose weights are the trainer's own."""

    name = "transformers"
    gives_logprobs = True
    same_numbers_as_trainer = True

    def __init__(
        self, model: Callable[[], Any], *, max_model_len: int | None = None, max_rows: int = 64, seed: int = 0
    ) -> None:
        self._get_model = model
        self.max_model_len = _context_window(model(), max_model_len)
        self._max_rows = max_rows
        self._seed = seed
        self._generator: torch.Generator | None = None
        self._run: _Run | None = None

    async def open(self) -> None:
        if self._run is not None:
            raise EngineError("the engine is already open; close the rollout that uses it first")
        model = self._get_model()
        _refuse_split_parameters(model)
        self._own_generator(model)
        self._run = _Run(model, self._max_rows, _vocabulary(model))

    async def sample(self, request: SampleRequest) -> Sample:
        if self._run is None:
            raise EngineError("the transformers engine is not open")
        check_request(request, self.max_model_len)
        return await self._run.sample(Row(request, self._generator_for(request)))

    async def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            await run.end()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Nothing to copy: the engine decodes with the trainer's own parameters."""

    def shutdown(self) -> None:
        """Nothing outlives `close`."""

    def sampling_state(self) -> dict[str, Any]:
        """The random numbers to come, for a checkpoint."""
        return {"generator": self._own_generator(self._get_model()).get_state()}

    def restore_sampling_state(self, state: dict[str, Any]) -> None:
        self._own_generator(self._get_model()).set_state(state["generator"])

    def _own_generator(self, model: Any) -> torch.Generator:
        if self._generator is None:  # lives as long as the engine: a second rollout draws other tokens
            self._generator = torch.Generator(next(model.parameters()).device).manual_seed(self._seed)
        return self._generator

    def _generator_for(self, request: SampleRequest) -> torch.Generator:
        assert self._generator is not None
        if request.seed is None:
            return self._generator
        return torch.Generator(self._generator.device).manual_seed(request.seed)


class _Run:
    """What lives between `open` and `close`: the wave, its thread, and the task that steps it."""

    def __init__(self, model: Any, max_rows: int, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._modes = [(module, module.training) for module in model.modules()]
        model.eval()
        self._new_wave = partial(Wave, model, max_rows=max_rows)
        self._wave = self._new_wave()
        self._answers: dict[Row, asyncio.Future[Sample]] = {}
        self._joining: list[Row] = []
        self._leaving: list[Row] = []
        self._work = asyncio.Event()
        self._ending = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="toolgrpo-transformers")
        self._pump = asyncio.get_running_loop().create_task(self._step_on(), name="transformers-pump")

    async def sample(self, row: Row) -> Sample:
        answer: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
        self._answers[row] = answer
        self._joining.append(row)
        self._work.set()
        try:
            return await answer
        finally:
            if self._answers.pop(row, None) is not None:  # cancelled, not answered
                self._leaving.append(row)

    async def end(self) -> None:
        """Let the running step end, fail what is still open, and give the model back as it was."""
        self._ending = True
        self._work.set()
        try:
            await self._pump
        finally:
            self._thread.shutdown()
            self._fail(EngineError("the engine was closed while this request was open"))
            for module, training in self._modes:
                module.training = training

    async def _step_on(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._ending:
            self._wave.join(self._joining)
            self._wave.leave(self._leaving)
            self._joining, self._leaving = [], []
            if not len(self._wave):
                self._work.clear()
                await self._work.wait()
                continue
            try:
                finished = await loop.run_in_executor(self._thread, self._wave.step)
            except Exception as error:  # a model can raise anything; every open request must hear of it
                self._wave, self._joining, self._leaving = self._new_wave(), [], []
                self._fail(_as_failure(error))
                continue
            for row in finished:
                answer = self._answers.pop(row, None)
                if answer is not None and not answer.done():
                    self._settle(answer, row)

    def _settle(self, answer: asyncio.Future[Sample], row: Row) -> None:
        try:
            sample = row.sample()
            assert sample.logprobs is not None
            answer.set_result(
                checked_sample(sample.ids, sample.logprobs, sample.finish_reason, row.request, self._vocabulary)
            )
        except BadAnswer as error:
            answer.set_exception(
                EngineError(
                    f"the transformers engine drew what cannot be trained on: {error}. Log-probabilities that are not "
                    f"numbers come from weights that are none: lower the learning rate, and resume from a checkpoint."
                )
            )

    def _fail(self, error: Exception) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)
        self._answers.clear()


def _as_failure(error: Exception) -> Exception:
    """Torch's runtime errors (out of memory, a lost device) are the world's; anything else is a bug and stays itself."""
    if not isinstance(error, RuntimeError):
        return error
    failure = EngineError(f"a forward pass of the transformers engine failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _context_window(model: Any, wanted: int | None) -> int:
    config = model.config.get_text_config()
    of_model = getattr(config, "max_position_embeddings", None)
    if of_model is None and wanted is None:
        raise ModelError(
            f"{type(config).__name__} does not say how many positions the model has (max_position_embeddings); "
            f"give a maximum model length"
        )
    return min(limit for limit in (of_model, wanted) if limit is not None)


def _vocabulary(model: Any) -> int:
    """Return how many ids the model can draw."""
    vocabulary: int = model.config.get_text_config().vocab_size
    return vocabulary


def _refuse_split_parameters(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id") or isinstance(parameter, DTensor):
            raise ConfigError(
                f"engine transformers decodes with the trainer's own parameters, but {name!r} is split over processes "
                f"(DeepSpeed ZeRO-3 or FSDP). Use --engine vllm_colocate or vllm_server."
            )
