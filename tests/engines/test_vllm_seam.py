"""What `engines/vllm_seam.py` relies on in vLLM beside the contract of all engines, which it keeps in
`test_engine_contract.py`: shown on a real engine on this machine."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import gc
import importlib.util
import io
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = [pytest.mark.contract, pytest.mark.vllm, pytest.mark.timeout(1200)]

from tests.engines.conftest import during_a_rollout  # noqa: E402
from tests.rollout.test_shared_engine import check_every_token  # noqa: E402
from tests.support.sampling import largest_gap, sample_together  # noqa: E402
from toolgrpo.engines import vllm_options, vllm_seam  # noqa: E402
from toolgrpo.engines.base import HasCache, Sample, SampleRequest, SamplingOptions  # noqa: E402
from toolgrpo.engines.vllm_colocate import VLLMColocateEngine  # noqa: E402
from toolgrpo.errors import EngineError  # noqa: E402


@pytest.fixture(scope="module")
def started(tiny_qwen3: Any) -> Iterator[tuple[VLLMColocateEngine, Any, dict[str, Any]]]:
    """The engine, its model, and what was true of torch around its start."""
    model = tiny_qwen3(0)
    around = {"function": torch.set_num_threads, "threads": torch.get_num_threads()}
    engine = start(model)
    around["threads after"], around["function after"] = torch.get_num_threads(), torch.set_num_threads
    engine.load_weights(model.named_parameters())
    yield engine, model, around
    engine.shutdown()


def start(model: Any) -> VLLMColocateEngine:
    options = vllm_options.VLLMOptions(dtype=torch.float32, max_model_len=256, max_num_seqs=16)
    return VLLMColocateEngine(vllm_seam.start_vllm(vllm_options.served_config(model), options))


def request(n: int = 20, max_tokens: int = 24, **options: Any) -> SampleRequest:
    return SampleRequest(
        ids=list(range(5, 5 + n)), max_tokens=max_tokens, stop_ids=(256,), options=SamplingOptions(**options)
    )


@pytest.mark.needs_cpu_vllm
def test_the_widths_of_heads_that_it_computes_on_a_cpu() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert tuple(CPUAttentionBackend.get_supported_head_sizes()) == vllm_options.CPU_HEAD_SIZES


@pytest.mark.needs_cpu_vllm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_what_its_gated_delta_rule_computes_on_a_cpu(size: int, dtype: torch.dtype) -> None:
    from vllm import _custom_ops

    query, key, value = (torch.randn(1, 8, heads, size, dtype=dtype) for heads in (1, 1, 2))
    gates, betas = torch.rand(1, 8, 2), torch.rand(1, 8, 2, dtype=dtype)
    ends, place = torch.tensor([0, 8], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    given = (query, key, value, -gates, betas, torch.zeros(2, 2, size, size), True, ends, False, True, place)
    if dtype == torch.bfloat16 and size in vllm_options.CPU_DELTA_RULE_SIZES:
        assert _custom_ops.chunk_gated_delta_rule_cpu(*given)[0].shape == value.shape
    else:
        with pytest.raises(RuntimeError, match="head dim size" if dtype == torch.bfloat16 else "dtype"):
            _custom_ops.chunk_gated_delta_rule_cpu(*given)


def test_the_installed_vllm_is_a_tested_one_and_leaves_torchs_threads_as_they_were(started: Any) -> None:
    around, versions = started[2], vllm_seam.TESTED_VERSIONS
    assert vllm_options.vllm_version() in versions, "add it to TESTED_VERSIONS once all tests pass with it"
    assert around["threads after"] == around["threads"], "vLLM changes their number; torch_threads_kept puts it back"
    assert around["function after"] is around["function"], "vLLM replaces torch.set_num_threads on the CPU"


def test_what_vllm_says_of_a_gpu_without_bf16_names_our_flags() -> None:
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.origin is not None
    source = Path(found.origin).parent / "platforms" / "cuda.py"  # it imports on a GPU only
    functions = (node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.FunctionDef))
    check = next(node for node in functions if node.name == "check_if_supports_dtype")
    check.decorator_list = []
    names: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module([check], []), str(source), "exec"), names)
    says = {"has_device_capability": False, "get_device_capability": None, "get_device_name": "Tesla T4"}
    card = SimpleNamespace(**{name: lambda *_, it=it: it for name, it in says.items()})
    with pytest.raises(ValueError, match="--dtype=half") as refused:
        names["check_if_supports_dtype"](card, torch.bfloat16)
    said = vllm_seam._said(refused.value)
    assert "Tesla T4" in said and said.endswith("Train in fp16: --bf16 false --fp16 true")


def test_it_says_how_many_tokens_its_cache_holds_in_small_blocks_on_a_cpu(started: Any) -> None:
    engine = started[0]
    config = engine._vllm._engine.vllm_config.cache_config
    room = engine.cache
    assert isinstance(engine, HasCache) and room is not None and (room.window, room.at_a_time) == (256, 16)
    assert room.tokens == config.num_gpu_blocks * config.block_size, "vLLM keeps the number under another name"
    if not torch.cuda.is_available():
        no_longer = "vLLM no longer takes the block size it is asked for; its own on a CPU is 128 tokens"
        assert config.block_size == vllm_options.CPU_BLOCK_SIZE, no_longer


def test_a_failing_step_reaches_every_request_and_no_other(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM caches a prefix when it schedules it: what the failed step did not compute must not be read by the next."""
    engine, model, _ = started
    executor = engine._vllm._engine.engine_core.engine_core.model_executor
    works, failures = executor.execute_model, iter([RuntimeError("out of memory")])

    def fails_once(*args: Any, **kwargs: Any) -> Any:
        for failure in failures:
            raise failure
        return works(*args, **kwargs)

    monkeypatch.setattr(executor, "execute_model", fails_once)
    asked = [request(n) for n in (200, 220)]  # longer than a block of the cache (128 tokens on the CPU)

    async def work() -> tuple[list[Any], list[Sample]]:
        lost = await asyncio.gather(*(engine.sample(one) for one in asked), return_exceptions=True)
        return lost, list(await asyncio.gather(*(engine.sample(one) for one in asked)))

    lost, samples = during_a_rollout(engine, work)
    assert [type(one) for one in lost] == [EngineError] * 2 and "out of memory" in str(lost[0])
    assert largest_gap(model, asked, samples) < 1e-4
    assert engine._vllm.has_work is False


def test_a_second_engine_lives_beside_the_first_and_goes_without_it(started: Any, tiny_qwen3: Any) -> None:
    """As when a notebook makes a trainer anew: vLLM would end the groups of both with either."""
    engine, model, around = started
    other = tiny_qwen3(3)
    with contextlib.redirect_stdout(io.StringIO()):  # as in a notebook, where it may have no file number
        second = start(other)
    second.load_weights(other.named_parameters())
    asked = [request(n) for n in (3, 30)]
    assert largest_gap(other, asked, sample_together(second, *asked)) < 1e-4
    assert largest_gap(model, asked, sample_together(engine, *asked)) < 1e-4
    second.shutdown()
    second.shutdown()
    assert largest_gap(model, asked, sample_together(engine, *asked)) < 1e-4
    with pytest.raises(EngineError, match="this engine was released"):
        sample_together(second, *asked)
    assert torch.get_num_threads() == around["threads"] and gc.get_freeze_count() == 0


def test_every_token_is_as_probable_as_the_weights_that_it_names_make_it(started: Any, tiny_qwen3: Any) -> None:
    engine, model, _ = started
    check_every_token(engine, tiny_qwen3, is_exact=True)
    engine.load_weights(model.named_parameters())


@pytest.mark.parametrize("error", [AssertionError("DP adjusted local rank 3 is out of bounds"), KeyError("RANK")])
def test_a_start_that_fails_leaves_nothing_changed(
    error: Exception, tiny_qwen3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process sees one GPU, as on a cluster: it is number 0, whatever the process's own is."""
    import vllm

    seen: dict[str, str] = {}

    def fails(*_: Any) -> Any:
        seen.update({name: os.environ[name] for name in ("LOCAL_RANK", "VLLM_ENABLE_V1_MULTIPROCESSING")})
        torch.set_float32_matmul_precision("highest")  # as vLLM does
        raise error

    monkeypatch.setattr(vllm.LLMEngine, "from_engine_args", fails)
    monkeypatch.setattr(vllm_seam, "_living", {0: True})  # the trainer's processes
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # --tf32 true
    model = tiny_qwen3(0)
    options = vllm_options.VLLMOptions(dtype=torch.bfloat16, on_cpu=False, max_model_len=256)
    try:
        with pytest.raises(EngineError, match=rf"{type(error).__name__}"):
            vllm_seam.start_vllm(model.config, options)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert seen == {"LOCAL_RANK": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    assert os.environ["LOCAL_RANK"] == "3" and "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ
    assert not logging.getLogger("vllm.utils.jit_monitor").isEnabledFor(logging.WARNING)
