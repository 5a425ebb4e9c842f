"""Jobs for TRL that reach into the trainer or its model: told where to reach, instead of having no effect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
from transformers import GenerationMixin

from toolgrpo.errors import ConfigError
from toolgrpo.testing import ByteChat, tiny_trainer


def said(request: Any, number: int) -> list[int]:
    return ByteChat.say("so" * (1 + number % 2))


def one(completions: list[Any], **_: Any) -> list[float]:
    return [1.0] * len(completions)


@pytest.mark.parametrize("kind", ["mocked", "a function", "mocked for all models"])
def test_a_replaced_generate_is_refused(kind: str, tmp_path: Path) -> None:
    with tiny_trainer(tmp_path, one, said, max_steps=1) as trainer:
        replaced: dict[str, Callable[[], Any]] = {
            "mocked": lambda: patch.object(trainer.model, "generate", side_effect=print),
            "a function": lambda: patch.object(trainer.model, "generate", new=print),
            "mocked for all models": lambda: patch.object(GenerationMixin, "generate", new=MagicMock()),
        }
        with replaced[kind](), pytest.raises(ConfigError, match=r"`generate` was replaced, .* \(`engine=`"):
            trainer.train()
        trainer.train()  # taken off again
        assert trainer.state.global_step == trainer.state.max_steps
