"""A run whose engine draws from another model than the one that is trained ends with a sentence."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trainings import run_to_end
from toolgrpo.engines.transformers import ReplicaEngine
from toolgrpo.errors import ModelError
from toolgrpo.testing.trainers import tiny_qwen3, tiny_trainer

DIFFERS = r"engine replica .* Qwen3ForCausalLM in float32 .* 0\.001.*--engine transformers"


class Copy(ReplicaEngine):
    """An engine that may leave a weight as it was."""

    restores = 0
    forgets: str | None = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self._replica.named_parameters())
        super().load_weights((name, own[name].data if name == self.forgets else weight) for name, weight in weights)


def odd(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(str(one)) % 2) for one in completions]


def train(folder: Path, engine: Copy, reward: Any = odd, **changes: Any) -> Any:
    options = {"max_completion_length": 40, "learning_rate": 1e-2, **changes}
    return run_to_end(tiny_trainer(folder, reward, None, parts={"engine": engine}, **options))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 20, "repetition_penalty": 1.1}])
def test_an_engine_with_the_trainers_weights_goes_on(tmp_path: Path, sampling: dict[str, Any]) -> None:
    assert train(tmp_path, Copy(tiny_qwen3(1)), **sampling).state.global_step == 2


def test_one_that_kept_a_weight_of_its_own_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    engine = Copy(tiny_qwen3(1))
    engine.forgets = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(ModelError, match=DIFFERS):
        train(tmp_path, engine)


def test_it_is_asked_again_when_the_engine_lost_its_weights(tmp_path: Path) -> None:
    engine = Copy(tiny_qwen3(1))

    def loses_them(completions: Any, **_: Any) -> list[float]:
        with torch.no_grad():
            engine._replica.model.norm.weight.mul_(1.5)
        engine.forgets = "model.norm.weight"
        engine.restores += 1
        return odd(completions)

    with pytest.raises(ModelError, match=DIFFERS):
        train(tmp_path, engine, loses_them)
