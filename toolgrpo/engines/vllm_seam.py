"""The one file that touches what is not public in vLLM. Tested with vLLM 0.32.0.

What is used, and why (`test_vllm_seam.py` and `test_engine_contract.py` in tests/engines fail when one
of these changes):

* environment variables read as `vllm` starts: `VLLM_ENABLE_V1_MULTIPROCESSING=0` keeps the engine in
  this process, so that it can be stepped, and is put back (a server started from here would inherit it);
  `LOCAL_RANK`, by which it takes a GPU; on the CPU `VLLM_CPU_OMP_THREADS_BIND` and `VLLM_CPU_KVCACHE_SPACE`;
* `LLMEngine.add_request/step/abort_request/has_unfinished_requests`: the engine, one step at a
  time; `output_processor.request_states`: how far an open request is;
* `collective_rpc("reload_weights", weights_iterator=...)`: replaces weights on every platform
  (loading parameter by parameter crashes on the CPU, where vLLM has repacked them); its logger
  complains of layers that have no weights in any checkpoint, which is filtered;
* `cache_config.kv_cache_size_tokens`: the tokens that its cache holds, once it has measured its memory;
* `LLMEngine.sleep(level)` and `wake_up(tags)`; `reset_prefix_cache`, which says whether it could;
* `ModelConfig.compute_hash`, which has the model's path in it (`vllm_options.py`);
* `EngineArgs(enable_lora=...)`, `LoRARequest` and `LLMEngine.remove_lora`: an adapter beside the
  base model, a new one each step;
* `vllm.v1.engine.core.cleanup_dist_env_and_memory`: vLLM ends the process's default group when it
  shuts down; where that is the trainer's, only vLLM's own groups are ended, and nothing is while
  another engine of this process lives, which uses the same groups;
* vLLM takes what lives when it starts out of Python's garbage collection (`gc.freeze`): it is put
  back, or nobody would ever give back the trainer that the engine belongs to;
* on the CPU a head tied to the embeddings keeps a packed copy of the weights it was started with:
  it is packed again after every reload;
* on the CPU `UnquantizedFusedMoEMethod` packs the experts of a mixture for its kernel only if there
  is no kernel yet, and a reload would leave them as they came: `pack_experts_again` takes the old
  kernel away whenever experts are processed;
* as it starts it silences libraries by the file number of `sys.stdout`, which that of a notebook
  need not have: it gets the process's own meanwhile;
* `alloc_conf`, which rewrites PyTorch's allocator settings whole;
* on the CPU vLLM sets torch's thread count to 1 and replaces `torch.set_num_threads` by a function
  that does nothing, and everywhere it sets the precision of float32 products: all are put back,
  because the training pass runs in the same process;
* `vllm.utils.jit_monitor` warns of every kernel that this process compiles, the trainer's too: it is
  silenced, and Triton's report of autotuning that it switches on.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from toolgrpo.engines.base import CacheRoom, FinishReason, Sample, SampleRequest
from toolgrpo.engines.vllm_options import VLLMOptions, config_folder, vllm_version
from toolgrpo.errors import EngineError, FinalEngineError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


TESTED_VERSIONS = ("0.31.0", "0.32.0")
_START_ERRORS = (ValueError, RuntimeError, ImportError, NotImplementedError, AssertionError, KeyError)
_PARTS = ("weights", "kv_cache")  # of vLLM's memory, in the order they are taken back
_living: dict[int, bool] = {}  # engines of this process that live or start, and whether their group is the trainer's
_numbers = itertools.count()
_ending = threading.RLock()  # whoever has an engine last may be collected in any thread


def warn_if_untested(version: str | None, where: str) -> None:
    """Warn if this vLLM is not one this file was tested with."""
    if version is not None and version.partition("+")[0] not in TESTED_VERSIONS:
        warnings.warn(
            f"toolgrpo was tested with vLLM {', '.join(TESTED_VERSIONS)}; {version} {where} and may not fit.",
            stacklevel=3,
        )


@contextmanager
def torch_threads_kept() -> Iterator[None]:
    """Put torch's thread count, the function that sets it, and `--tf32` back to what they were."""
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    precision = torch.backends.cuda.matmul.fp32_precision
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        torch.backends.cuda.matmul.fp32_precision = precision


@contextmanager
def stdout_with_a_number() -> Iterator[None]:
    """Give vLLM a standard output with a file number, by which it silences libraries as it starts;
    that of a notebook may have none.
    """
    try:
        sys.stdout.fileno()
    except (AttributeError, OSError):
        with redirect_stdout(sys.__stdout__):
            yield
    else:
        yield


@contextmanager
def _environment_of_the_start(*, takes_a_gpu: bool) -> Iterator[None]:
    """Set what vLLM reads only while it starts: to stay in this process, and on the trainer's GPU.

    Where each process sees one GPU, its number is 0 whatever LOCAL_RANK says.
    """
    wanted = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if takes_a_gpu:
        wanted["LOCAL_RANK"] = str(torch.cuda.current_device())
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def fixed_segments() -> Iterator[None]:
    """Allocate outside of segments that grow (`startup.prepare`), whose memory other processes may not open."""
    from vllm.device_allocator.alloc_conf import EXPANDABLE_SEGMENTS, current_alloc_conf, set_alloc_conf, with_conf_flag

    before = current_alloc_conf()
    try:
        if before:
            set_alloc_conf(with_conf_flag(before, EXPANDABLE_SEGMENTS, False))
        yield
    finally:
        if before:
            set_alloc_conf(before)


def _prepare_environment(options: VLLMOptions) -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_DO_NOT_TRACK", "1")
    os.environ.setdefault("TRITON_PRINT_AUTOTUNING", "0")
    logging.getLogger("vllm.utils.jit_monitor").setLevel(logging.ERROR)
    if options.dtype is torch.float32 and not options.on_cpu:
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # else its attention computes in TF32, to three digits
    if not options.on_cpu:
        # FlashInfer's sampler knows no log-probabilities, so it is never used here; a start would compile or download it.
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    else:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(options.kv_cache_gib))


def start_vllm(
    config: PretrainedConfig, options: VLLMOptions, weights: Mapping[str, torch.Tensor] | None = None
) -> StepEngine:
    """Start vLLM in this process.

    `config.architectures` must name the model class. No tokenizer is loaded.

    Without `weights` the model starts with random ones, and `load_weights` has to come before the
    first request.
    """
    _prepare_environment(options)
    warn_if_untested(vllm_version(), "is installed")
    gc.collect()  # the engine of a trainer that nobody has any more is given back first
    shares_group = next(iter(_living.values()), torch.distributed.is_initialized())
    number = next(_numbers)
    with (
        torch_threads_kept(),
        stdout_with_a_number(),
        _environment_of_the_start(takes_a_gpu=shares_group and not options.on_cpu),
        config_folder(config, weights) as folder,
    ):
        from vllm import EngineArgs, LLMEngine
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        _living[number] = shares_group
        try:
            kind = config.get_text_config().model_type
            asked = options.engine_arguments(folder, kind, has_weights=weights is not None, shares_group=shares_group)
            arguments = EngineArgs(**asked)
            engine = LLMEngine.from_engine_args(arguments)
            if options.on_cpu:
                engine.apply_model(pack_experts_again)
        except BaseException as error:
            del _living[number]
            if not shares_group and not _living:  # a start that failed may leave the groups that it made
                cleanup_dist_env_and_memory()
            if not isinstance(error, _START_ERRORS):
                raise
            others = ""
            if _living and not options.on_cpu:
                others = f" {len(_living)} more live in this process: `trainer.close()` releases one."
            raise EngineError(
                f"vLLM could not start in this process: {_said(error)}. Choose another engine (engine transformers, or "
                f"vllm_server with a running `vllm serve`), or change the vllm_* options.{others}"
            ) from error
        finally:
            gc.unfreeze()
    return StepEngine(
        engine,
        number,
        sleep_mode=options.enable_sleep_mode,
        keeps_base=options.lora_rank is not None,
        seed=options.seed,
    )


def _said(error: BaseException) -> str:
    """Return an error's words: with our flags in place of vLLM's, and its kind where they say nothing without."""
    text = re.sub(r"You can use float16 .*--dtype=half\.?", "Train in fp16: --bf16 false --fp16 true", str(error))
    return text if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: {text}"


class StepEngine:
    """A vLLM `LLMEngine` in this process, driven one step at a time. Knows token ids only."""

    def __init__(
        self,
        engine: Any,
        number: int | None = None,
        *,
        sleep_mode: bool = False,
        keeps_base: bool = False,
        seed: int = 0,
    ) -> None:
        self._running: Any = engine  # None once it was shut down
        self._end = weakref.finalize(self, _end_vllm, engine, number)  # at the latest when nobody has it
        self._end.atexit = False
        self._keeps_base = keeps_base  # only adapters are loaded, over weights it was started with
        self._sleep_mode = sleep_mode
        self._asleep: tuple[str, ...] = ()  # what vLLM has given up, under its names
        self._adapter: Any = None
        self.needs_weights = False  # it slept, and what it held is gone
        self.seeds = np.random.default_rng(seed)  # of requests on an accelerator
        # state of Torch's numbers for draws on the CPU, from the first step on
        self.numbers: torch.Tensor | None = None

    @property
    def _engine(self) -> Any:
        if self._running is None:
            raise self._given_back()
        return self._running

    def _given_back(self) -> FinalEngineError:
        return FinalEngineError("this engine was released (`trainer.close()`); make a new trainer to generate")

    @property
    def on_cpu(self) -> bool:
        return str(self._engine.vllm_config.device_config.device_type) == "cpu"

    @property
    def max_model_len(self) -> int:
        return int(self._engine.model_config.max_model_len)

    @property
    def vocabulary(self) -> int:
        """Return how many ids the model can draw."""
        return int(self._engine.model_config.get_vocab_size())

    @property
    def cache(self) -> CacheRoom | None:
        config = self._engine.vllm_config
        tokens = config.cache_config.kv_cache_size_tokens
        return None if tokens is None else CacheRoom(tokens, self.max_model_len, config.scheduler_config.max_num_seqs)

    @property
    def has_work(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def add(self, request_id: str, request: SampleRequest) -> None:
        """Queue one request."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        options = request.options
        params = SamplingParams(
            max_tokens=request.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            seed=self._seed_of(request),
            stop_token_ids=list(request.stop_ids),
            ignore_eos=True,  # the request says what ends a turn, not the model's config
            logprobs=0,
            flat_logprobs=True,  # lists, not an object for each token
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # nobody else holds them
        )
        prompt = {"type": "token", "prompt_token_ids": list(request.ids)}  # with its type it needs no rendering
        self._engine.add_request(request_id, prompt, params, lora_request=self._adapter)

    def _seed_of(self, request: SampleRequest) -> int | None:
        """Return a request's own seed, or one of this engine.

        On an accelerator vLLM would draw one from NumPy's global numbers, which a reward may seed. On
        the CPU it draws from Torch's, and a seed costs a generator for each row: `_own_numbers`.
        """
        if request.seed is not None or self.on_cpu:
            return request.seed
        return int(self.seeds.integers(2**63))

    def step(self) -> list[tuple[str, Sample]]:
        """Run one forward pass, and return the requests that it finished."""
        with self._own_numbers():
            return [(output.request_id, _sample(output)) for output in self._engine.step() if output.finished]

    @contextmanager
    def _own_numbers(self) -> Iterator[None]:
        """On the CPU, draw from numbers that nobody else seeds: a reward that did at each call would repeat every draw."""
        if not self.on_cpu:
            yield
            return
        outside = torch.get_rng_state()
        torch.set_rng_state(outside if self.numbers is None else self.numbers)
        try:
            yield
        finally:
            self.numbers = torch.get_rng_state()
            torch.set_rng_state(outside)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._engine.abort_request(list(request_ids))

    def forget_prefixes(self) -> None:
        """Drop every cached prefix; open requests compute theirs again."""
        for running in (True,) if self.has_work else (False, True):  # a refusal is logged as a warning
            if self._engine.reset_prefix_cache(reset_running_requests=running):
                break
        else:
            raise EngineError("vLLM still holds prefixes that older weights computed, and would continue from them")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights, under their checkpoint names, and drop every cached prefix."""
        self._wake("weights")  # alone: the cache would take memory that gathering needs
        with torch_threads_kept(), _without_expected_gaps(self._engine):
            try:
                self._engine.collective_rpc(
                    "reload_weights", kwargs={"weights_iterator": iter(weights), "is_checkpoint_format": True}
                )
            except KeyError as error:
                raise EngineError(
                    f"vLLM's own form of this model has no weight {error}, which is trained; use --engine transformers"
                ) from error
            self._engine.apply_model(repack_tied_heads)
            self.forget_prefixes()
        self.needs_weights = False

    def load_adapter(self, folder: Path) -> None:
        """Use the LoRA adapter in `folder` (PEFT's format) in place of the one before."""
        from vllm.lora.request import LoRARequest

        self.wake()
        before = self._adapter
        number = 1 if before is None else before.lora_int_id + 1
        # Under a name of its own, so that no prefix cached with an older adapter is taken for it.
        self._adapter = LoRARequest(f"toolgrpo-{number}", number, str(folder))
        with torch_threads_kept():
            if before is not None:
                self._engine.remove_lora(before.lora_int_id)
            self._engine.add_lora(self._adapter)

    def sleep(self) -> None:
        """Give the accelerator's memory to the training pass, where sleep mode is on.

        Weights that the next step replaces are given up; those under an adapter are kept in main
        memory.
        """
        if self._sleep_mode and not self._asleep:
            self.needs_weights = not self._keeps_base
            self._engine.sleep(level=2 if self.needs_weights else 1)
            self._asleep = _PARTS

    def wake(self) -> None:
        """Take the memory back; `load_weights` must come before, where weights were given up."""
        if self._running is None:
            raise self._given_back()
        if self.needs_weights:
            raise EngineError("vLLM dropped its weights in sleep mode; call load_weights before the next rollout")
        self._wake(*_PARTS)

    def _wake(self, *parts: str) -> None:
        for part in (part for part in parts if part in self._asleep):
            self._engine.wake_up(tags=[part])
        self._asleep = tuple(part for part in self._asleep if part not in parts)

    def shutdown(self) -> None:
        """End vLLM and give its memory back; the trainer's process group goes on. Safe to call
        twice.
        """
        self._running = None
        self._end()


def _end_vllm(engine: Any, number: int | None) -> None:
    from vllm.distributed.parallel_state import destroy_model_parallel
    from vllm.v1.engine import core

    with _ending:
        shares_group = number is not None and _living.pop(number)
        whole_cleanup = core.cleanup_dist_env_and_memory
        if _living:
            core.cleanup_dist_env_and_memory = lambda: None  # the engine that still uses them keeps the groups
        elif shares_group:
            core.cleanup_dist_env_and_memory = destroy_model_parallel
        try:
            engine.engine_core.shutdown()
        finally:
            core.cleanup_dist_env_and_memory = whole_cleanup
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def _without_expected_gaps(engine: Any) -> Iterator[None]:
    """Keep vLLM from saying, at every step, that layers got no weights which have none in a checkpoint,
    or that it did not count experts that came fused.
    """
    text_config = engine.model_config.hf_text_config
    tied = getattr(text_config, "tie_word_embeddings", False)
    gaps = ("RotaryEmbedding", "ParallelLMHead") if tied else ("RotaryEmbedding",)

    def expected(record: logging.LogRecord) -> bool:
        layer, _, what = record.getMessage().partition(": ")
        if layer == "Following weights were not loaded from checkpoint":
            return not all(".routed_experts." in name for name in what.strip("{}").split(", "))
        return not (what == "Failed to load weights" and layer.endswith(gaps))

    logs = [
        logging.getLogger(f"vllm.{module}")
        for module in ("model_executor.model_loader.reload.layerwise", "v1.worker.gpu_model_runner")
    ]
    for log in logs:
        log.addFilter(expected)
    try:
        yield
    finally:
        for log in logs:
            log.removeFilter(expected)


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Pack the output head again: a tied head gets no weights of its own in a reload,
    so its packed copy would be stale.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


def pack_experts_again(model: torch.nn.Module) -> None:
    """Let every reload pack the experts for the CPU's kernel, as the first load did. Safe to call twice."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and "process_weights_after_loading" not in vars(method):
            method.process_weights_after_loading = partial(_with_a_new_kernel, method)


def _with_a_new_kernel(method: Any, layer: Any) -> None:
    method.moe_kernel = None
    type(method).process_weights_after_loading(method, layer)


def _sample(output: Any) -> Sample:
    completion = output.outputs[0]
    ids = tuple(completion.token_ids)
    logprobs = tuple(completion.logprobs.logprobs)  # `logprobs=0`: one a token, that of the token drawn
    finish = FinishReason.STOP if completion.finish_reason == "stop" else FinishReason.LENGTH
    return Sample(ids=ids, logprobs=logprobs, finish_reason=finish)  # the engine checks it
