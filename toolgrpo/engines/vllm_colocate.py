"""vLLM in the trainer's own process, stepped while any request is open.

One pump task per rollout calls `StepEngine.step` and hands results to the waiting episodes; between
two steps the event loop runs whatever is ready (tool results, new requests), so a slow tool hides
behind other trajectories' decoding.

Invariants: every `sample` gets a `Sample`, an `EngineError` or a cancellation; a cancelled request
is aborted inside vLLM before the next step; after `close` the engine has no open request. A step
that fails costs the requests that are open; the next request finds the engine empty, without what
that step may have left half computed in the prefix cache.

Not covered: tensor parallelism over several processes (refused at start; use the server engine for
that).
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from toolgrpo.engines.base import CacheRoom, Sample, SampleRequest
from toolgrpo.engines.checks import BadAnswer, check_request, checked_sample
from toolgrpo.engines.vllm_seam import StepEngine
from toolgrpo.errors import EngineError

if TYPE_CHECKING:
    import torch


_PAUSE_S, _MOST_PAUSES = 0.001, 10


class _Waiting(NamedTuple):
    """An open request, and where its sample goes."""

    request: SampleRequest
    future: asyncio.Future[Sample]


class VLLMColocateEngine:
    """The `vllm_colocate` engine.

    With `save_adapter` only a LoRA adapter is handed over in each step: it is called with a folder
    to save it in.
    """

    name = "vllm_colocate"
    gives_logprobs = True
    same_numbers_as_trainer = False
    restores = 0

    def __init__(self, vllm: StepEngine, save_adapter: Callable[[Path], Any] | None = None) -> None:
        self._vllm = vllm
        self._save_adapter = save_adapter
        self._numbers = itertools.count()
        self._waiting: dict[str, _Waiting] = {}
        self._aborted: list[str] = []
        self._work: asyncio.Event | None = None
        self._pump: asyncio.Task[None] | None = None

    @property
    def max_model_len(self) -> int:
        return self._vllm.max_model_len

    @property
    def cache(self) -> CacheRoom | None:
        return self._vllm.cache

    @property
    def takes_weights_while_open(self) -> bool:
        """Return whether requests in flight may go on with new weights: not with adapters, whose folder goes with the next."""
        return self._save_adapter is None

    @property
    def needs_weights(self) -> bool:
        """Return whether it slept and gave its weights up, so that they must be loaded before the next rollout."""
        return self._vllm.needs_weights

    async def open(self) -> None:
        """Start the pump on the running event loop."""
        if self._pump is not None:
            raise EngineError("the engine is already open; close the rollout that uses it first")
        self._vllm.wake()
        self._work = asyncio.Event()
        self._pump = asyncio.get_running_loop().create_task(self._run(), name="vllm-pump")

    async def sample(self, request: SampleRequest) -> Sample:
        if self._work is None or self._pump is None or self._pump.done():
            raise EngineError("the vLLM engine is not open, or broke down before this request")
        check_request(request, self.max_model_len)
        request_id = str(next(self._numbers))
        future: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
        self._vllm.add(request_id, request)
        self._waiting[request_id] = _Waiting(request, future)
        self._work.set()
        try:
            return await future
        finally:
            if self._waiting.pop(request_id, None) is not None:  # cancelled, not answered
                self._aborted.append(request_id)
                self._work.set()

    async def close(self) -> None:
        """Stop the pump and drop whatever is still open inside vLLM."""
        pump, self._pump, self._work = self._pump, None, None
        if pump is not None:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
        self._abort([*self._aborted, *self._waiting])
        self._fail_waiting(EngineError("the engine was closed while this request was open"))
        self._vllm.sleep()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace the weights.

        With adapters alone, `weights`, the merged ones, are not even walked.
        """
        if self._save_adapter is None:
            self._vllm.load_weights(weights)
            return
        with tempfile.TemporaryDirectory(prefix="toolgrpo-adapter-") as folder:
            self._save_adapter(Path(folder))
            self._vllm.load_adapter(Path(folder))

    def sampling_state(self) -> dict[str, Any]:
        """Return the state of the seeds and draws to come, for a checkpoint."""
        return {**self._vllm.seeds.bit_generator.state, "numbers": self._vllm.numbers}

    def restore_sampling_state(self, state: dict[str, Any]) -> None:
        self._vllm.numbers = state.get("numbers")
        self._vllm.seeds.bit_generator.state = {name: one for name, one in state.items() if name != "numbers"}

    def shutdown(self) -> None:
        self._vllm.shutdown()

    async def _run(self) -> None:
        assert self._work is not None
        resting = False  # nothing was left to decode after the last step
        try:
            while True:
                self._abort(self._aborted)
                if not self._vllm.has_work:
                    self._work.clear()
                    await self._work.wait()
                    resting = True
                if resting:
                    await self._gather()
                    resting = False
                    continue
                try:
                    finished = self._vllm.step()
                except Exception as error:  # vLLM can raise anything from inside a step; every episode must hear of it
                    self._start_over(error)
                    finished = []
                for request_id, sample in finished:
                    waiting = self._waiting.pop(request_id, None)
                    if waiting is not None and not waiting.future.done():
                        self._settle(waiting, sample)
                resting = not self._vllm.has_work
                await asyncio.sleep(0)
        except Exception as error:  # nor does an abort have to work; without a pump no further request is taken
            self._fail_waiting(_failed_step(error))

    def _settle(self, waiting: _Waiting, sample: Sample) -> None:
        try:
            assert sample.logprobs is not None
            vocabulary = self._vllm.vocabulary
            waiting.future.set_result(
                checked_sample(sample.ids, sample.logprobs, sample.finish_reason, waiting.request, vocabulary)
            )
        except BadAnswer as error:
            waiting.future.set_exception(EngineError(f"vLLM returned a sample that cannot be trained on: {error}"))

    async def _gather(self) -> None:
        """Let those that ended together go on together: after a pause,
        hold the first step while requests keep coming.

        An engine with nothing to do has mostly just ended a turn of many episodes, whose quick
        tools answer one after the other. Steps for the first few of them would take as long as one
        for all.
        """
        for _ in range(_MOST_PAUSES):
            before = len(self._waiting)
            await asyncio.sleep(_PAUSE_S)
            if len(self._waiting) <= before:
                return

    def _start_over(self, error: Exception) -> None:
        """Fail every open request, and leave vLLM with none of them and no prefix of theirs."""
        request_ids = [*self._waiting]
        self._fail_waiting(_failed_step(error))
        self._abort([*self._aborted, *request_ids])
        self._vllm.forget_prefixes()

    def _fail_waiting(self, failure: EngineError) -> None:
        waiting, self._waiting = self._waiting, {}
        for one in waiting.values():
            if not one.future.done():
                one.future.set_exception(failure)

    def _abort(self, request_ids: list[str]) -> None:
        if request_ids:
            self._vllm.abort(request_ids)
            self._aborted = []


def _failed_step(error: Exception) -> EngineError:
    failure = EngineError(f"a step of the vLLM engine failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
