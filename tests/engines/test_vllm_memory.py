"""What the seam asks of vLLM between rollouts, on an engine that only writes down what it is asked."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from toolgrpo.engines.base import SampleRequest, SamplingOptions
from toolgrpo.engines.vllm_colocate import VLLMColocateEngine
from toolgrpo.engines.vllm_seam import StepEngine
from toolgrpo.errors import EngineError

LAYERWISE = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")


class Asked:
    """Stands in for vLLM's `LLMEngine`."""

    open = 0
    engine_core = SimpleNamespace(shutdown=lambda: None)

    def __init__(self, *, tied: bool = True, resets: tuple[bool, ...] = (), device: str = "cpu") -> None:
        self.vllm_config = SimpleNamespace(device_config=SimpleNamespace(device_type=device))
        self.model_config = SimpleNamespace(hf_text_config=SimpleNamespace(tie_word_embeddings=tied))
        self.calls: list[Any] = []
        self._resets = list(resets)

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake", *tags))

    def collective_rpc(self, method: str, kwargs: Any) -> None:
        self.calls.append(("load", *[name for name, _ in kwargs["weights_iterator"]]))
        for layer in ("RotaryEmbedding", "YaRNScalingRotaryEmbedding", "ParallelLMHead", "QKVParallelLinear"):
            LAYERWISE.warning("%s: Failed to load weights", layer)

    def has_unfinished_requests(self) -> bool:
        return self.open > 0

    def add_request(self, request_id: str, prompt: Any, params: Any, lora_request: Any) -> None:
        self.calls.append(params.seed)

    def apply_model(self, function: Any) -> None: ...

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.calls.append(("reset", reset_running_requests))
        return self._resets.pop(0) if self._resets else True


def test_weights_that_the_next_step_replaces_are_given_up_and_the_cache_comes_back_last() -> None:
    vllm = Asked()
    sleepless = StepEngine(vllm)
    sleepless.sleep()
    sleepless.wake()
    assert vllm.calls == [] and not sleepless.needs_weights, "without sleep mode nothing sleeps"
    engine = StepEngine(vllm, sleep_mode=True)
    engine.sleep()
    engine.sleep()
    assert vllm.calls == [("sleep", 2)] and engine.needs_weights
    with pytest.raises(EngineError, match="load_weights"):
        engine.wake()
    engine.load_weights([("w", None)])  # type: ignore[list-item]
    assert not engine.needs_weights
    engine.wake()
    assert vllm.calls[1:] == [("wake", "weights"), ("load", "w"), ("reset", False), ("wake", "kv_cache")]


def test_weights_under_an_adapter_are_kept() -> None:
    vllm = Asked()
    engine = StepEngine(vllm, sleep_mode=True, keeps_base=True)
    engine.sleep()
    assert not engine.needs_weights
    engine.wake()
    assert vllm.calls == [("sleep", 1), ("wake", "weights"), ("wake", "kv_cache")]


def test_a_cache_that_cannot_be_emptied_is_tried_harder_and_then_an_error() -> None:
    tried_harder = Asked(resets=(False, True))
    StepEngine(tried_harder).forget_prefixes()
    assert tried_harder.calls == [("reset", False), ("reset", True)]
    with pytest.raises(EngineError, match="older weights"):
        StepEngine(Asked(resets=(False, False))).forget_prefixes()
    busy = Asked()
    busy.open = 1
    StepEngine(busy).forget_prefixes()
    assert busy.calls == [("reset", True)], "asked to leave open requests alone, vLLM refuses and warns"


def test_on_an_accelerator_requests_get_seeds_that_no_reward_can_repeat(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")

    def seeds(engine: VLLMColocateEngine, vllm: Asked, *given: int | None) -> list[Any]:
        np.random.seed(0)  # as a reward may
        before = len(vllm.calls)
        for number, seed in enumerate(given):
            engine._vllm.add(str(number), SampleRequest((1, 2), 5, (), SamplingOptions(), seed))
        return vllm.calls[before:]

    gpu, cpu, other = Asked(device="cuda"), Asked(), Asked(device="cuda")
    first, second = (VLLMColocateEngine(StepEngine(vllm, seed=seed)) for vllm, seed in ((gpu, 1), (other, 2)))
    drawn = seeds(first, gpu, None, None, 7)
    assert drawn[2] == 7 and len({*drawn, *seeds(second, other, None, None)}) == 5
    assert seeds(VLLMColocateEngine(StepEngine(cpu)), cpu, None, 7) == [None, 7]
    torch.save(first.sampling_state(), tmp_path / "state")
    ahead = seeds(first, gpu, None, None)
    second.restore_sampling_state(torch.load(tmp_path / "state", weights_only=True))
    assert seeds(second, other, None, None) == ahead


@pytest.mark.parametrize(("tied", "said"), [(True, ["QKV"]), (False, ["ParallelLMHead", "QKV"])])
def test_only_layers_without_weights_of_their_own_are_not_complained_of(
    tied: bool, said: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (("handlers", [caplog.handler]), ("propagate", False)):  # vLLM's own handlers stay out of it
        monkeypatch.setattr(LAYERWISE, name, value)
    with caplog.at_level(logging.WARNING, LAYERWISE.name):
        StepEngine(Asked(tied=tied)).load_weights([])
    assert [next(name for name in said if message.startswith(name)) for message in caplog.messages] == said
    assert LAYERWISE.filters == []
