"""Generation on the trainer's own model: no vLLM needed, and no weights to copy.

Requests join and leave between any two tokens (`decode_batch.py`), as in vLLM, so no trajectory
waits for a slower one. The forward passes run in one thread of their own; the event loop only hands
rows over between two steps.

Invariants: every `sample` gets a `Sample`, an error or a cancellation; a cancelled row leaves the
batch before the next step; after `close` there is no row, no cache and no thread, and each module
is in the mode (train or eval) it was in.

Parameters that are split over processes (DeepSpeed ZeRO-3, FSDP) would have every process take the
same number of steps, so `TransformersEngine.open` refuses them, and `ReplicaEngine` decodes with a
whole copy.

Not covered: prefixes are not cached, so each turn reads its whole prompt again; in the copy,
quantised models.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from toolgrpo.engines.adapters import own_weights
from toolgrpo.engines.base import Sample, SampleRequest
from toolgrpo.engines.checks import BadAnswer, check_request, checked_sample
from toolgrpo.engines.decode_batch import DecodeBatch, DecodingRow, bound_time_steps_as_trained, empty_cache
from toolgrpo.errors import ConfigError, EngineError, ModelError
from toolgrpo.support.process_setup import on_this_device


class TransformersEngine:
    """The `transformers` engine.

    `model` yields the unwrapped model, whose weights are the trainer's own.
    """

    name = "transformers"
    gives_logprobs = True
    same_numbers_as_trainer = True
    takes_weights_while_open = False

    def __init__(
        self, model: Callable[[], Any], *, max_model_len: int | None = None, max_rows: int = 64, seed: int = 0
    ) -> None:
        self._get_model = model
        self.max_model_len = _context_window(model(), max_model_len)
        empty_cache(model())  # refuses what it cannot decode before anything runs
        bound_time_steps_as_trained(model())
        self._max_rows = max_rows
        self._seed = seed
        self._generator: torch.Generator | None = None
        self._loop: _DecodeLoop | None = None
        self._stepping = threading.Lock()  # held in each step

    async def open(self) -> None:
        if self._loop is not None:
            raise EngineError("the engine is already open; close the rollout that uses it first")
        model = self._get_model()
        _refuse_split_parameters(model)
        self._own_generator(model)
        vocabulary = model.config.get_text_config().vocab_size  # how many ids the model can draw
        self._loop = _DecodeLoop(model, self._max_rows, vocabulary, self._stepping)

    async def sample(self, request: SampleRequest) -> Sample:
        if self._loop is None:
            raise EngineError("the transformers engine is not open")
        check_request(request, self.max_model_len)
        return await self._loop.sample(DecodingRow(request, self._generator_for(request)))

    async def close(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            await loop.end()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Do nothing: the engine decodes with the trainer's own parameters."""

    def shutdown(self) -> None:
        """Do nothing: no resource outlives `close`."""

    def sampling_state(self) -> dict[str, Any]:
        """Return the state of the random numbers to come, for a checkpoint."""
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


class ReplicaEngine(TransformersEngine):
    """The `transformers` engine where processes split the parameters (FSDP, DeepSpeed ZeRO-3).

    Each process keeps a whole copy of the model beside its part, and `load_weights` fills it. So
    every process decodes on its own, and none waits for another inside a rollout. The copy takes
    the memory of one whole model in each process: where that is too much, `vllm serve` on other
    devices is the engine to use.
    """

    name = "replica"
    same_numbers_as_trainer = False
    takes_weights_while_open = True

    def __init__(self, replica: Any, *, max_model_len: int | None = None, max_rows: int = 64, seed: int = 0) -> None:
        super().__init__(lambda: replica, max_model_len=max_model_len, max_rows=max_rows, seed=seed)
        self._replica = replica.eval()

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy every weight, walking `weights` to the end: gathering them is collective."""
        own = dict(own_weights(self._replica))
        missing = set(own)
        with self._stepping:
            for name, tensor in weights:
                if name in own:
                    own[name].copy_(tensor)
                    missing.discard(name)
        if missing:
            raise EngineError(
                f"the trainer gave no weights for {len(missing)} of the model's weights, e.g. {min(missing)!r}; its "
                f"copy for generation would be stale. Use engine vllm_server, and report this."
            )


class _DecodeLoop:
    """State between `open` and `close`: the batch, its thread, and the task that steps it."""

    def __init__(self, model: Any, max_rows: int, vocabulary: int, stepping: threading.Lock) -> None:
        self._vocabulary = vocabulary
        self._stepping = stepping
        self._modes = [(module, module.training) for module in model.modules()]
        model.eval()
        self._new_batch = partial(DecodeBatch, model, max_rows=max_rows)
        self._batch = self._new_batch()
        self._answers: dict[DecodingRow, asyncio.Future[Sample]] = {}
        self._joining: list[DecodingRow] = []
        self._leaving: list[DecodingRow] = []
        self._work = asyncio.Event()
        self._ending = False
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="toolgrpo-transformers", initializer=on_this_device(lambda: None)
        )
        self._pump = asyncio.get_running_loop().create_task(self._step_on(), name="transformers-pump")

    async def sample(self, row: DecodingRow) -> Sample:
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
            self._batch.join(self._joining)
            self._batch.leave(self._leaving)
            self._joining, self._leaving = [], []
            if not len(self._batch):
                self._work.clear()
                await self._work.wait()
                continue
            try:
                finished = await loop.run_in_executor(self._thread, self._step)
            except Exception as error:  # a model can raise anything; every open request must hear of it
                self._batch, self._joining, self._leaving = self._new_batch(), [], []
                self._fail(_as_failure(error))
                continue
            for row in finished:
                answer = self._answers.pop(row, None)
                if answer is not None and not answer.done():
                    self._settle(answer, row)

    def _step(self) -> list[DecodingRow]:
        with self._stepping:
            return self._batch.step()

    def _settle(self, answer: asyncio.Future[Sample], row: DecodingRow) -> None:
        try:
            sample = row.sample()
            assert sample.logprobs is not None
            answer.set_result(
                checked_sample(sample.ids, sample.logprobs, sample.finish_reason, row.request, self._vocabulary)
            )
        except BadAnswer as error:
            answer.set_exception(
                EngineError(
                    f"the transformers engine returned a sample that cannot be trained on: {error}. Log-probabilities that are not "
                    f"numbers come from weights that are not numbers: lower the learning rate, and resume from a checkpoint."
                )
            )

    def _fail(self, error: Exception) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)
        self._answers.clear()


def _as_failure(error: Exception) -> Exception:
    """Return Torch's runtime errors (out of memory, a lost device) as `EngineError`.

    Anything else is a bug and is returned as it is.
    """
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


def _refuse_split_parameters(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id") or isinstance(parameter, DTensor):
            raise ConfigError(
                f"engine transformers decodes with the trainer's own parameters, but {name!r} is split over processes "
                f"(DeepSpeed ZeRO-3 or FSDP). Use engine vllm_colocate or vllm_server."
            )
