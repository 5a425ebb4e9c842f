"""The fakes that our tests and our users' tests run on."""

from toolgrpo.testing.clock import FakeClock
from toolgrpo.testing.engine import ScriptedEngine, ScriptedReply, scripted_logprob

__all__ = ["FakeClock", "ScriptedEngine", "ScriptedReply", "scripted_logprob"]
