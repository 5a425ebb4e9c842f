"""Fakes for users' tests and for our own."""

from toolgrpo.testing.chat import ByteChat, byte_tokenizer
from toolgrpo.testing.engine import (
    FakeClock,
    ScriptedEngine,
    ScriptedReply,
    run_episode,
    scripted_logprob,
    scripted_runner,
)
from toolgrpo.testing.tools import ScriptedTools
from toolgrpo.testing.trainers import numbered_tokenizer, tiny_config, tiny_qwen3, tiny_trainer
from toolgrpo.testing.vllm_stand_in import StandInVLLM

__all__ = [
    "ByteChat",
    "FakeClock",
    "ScriptedEngine",
    "ScriptedReply",
    "ScriptedTools",
    "StandInVLLM",
    "byte_tokenizer",
    "numbered_tokenizer",
    "run_episode",
    "scripted_logprob",
    "scripted_runner",
    "tiny_config",
    "tiny_qwen3",
    "tiny_trainer",
]
