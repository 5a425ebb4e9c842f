"""The fakes that our tests and our users' tests run on."""

from toolgrpo.testing.chat import ByteChat, byte_tokenizer
from toolgrpo.testing.chat_families import trl_tokenizer
from toolgrpo.testing.clock import FakeClock
from toolgrpo.testing.engine import ScriptedEngine, ScriptedReply, scripted_logprob
from toolgrpo.testing.episodes import run_episode, scripted_runner
from toolgrpo.testing.numbered_tokenizer import numbered_tokenizer
from toolgrpo.testing.tools import ScriptedTools
from toolgrpo.testing.trainers import tiny_config, tiny_qwen3, tiny_trainer

__all__ = [
    "ByteChat",
    "FakeClock",
    "ScriptedEngine",
    "ScriptedReply",
    "ScriptedTools",
    "byte_tokenizer",
    "numbered_tokenizer",
    "run_episode",
    "scripted_logprob",
    "scripted_runner",
    "tiny_config",
    "tiny_qwen3",
    "tiny_trainer",
    "trl_tokenizer",
]
