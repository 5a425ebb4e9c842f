"""The limits of an episode, as one declarative value. `None` means no limit of that kind."""

from __future__ import annotations

from dataclasses import dataclass

from toolgrpo.errors import ConfigError
from toolgrpo.rollout.compaction import ContextLimit


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """What ends an episode, or cuts a part of it short."""

    max_completion_length: int  # all tokens after the prompt, sampled and context; not the prompts of later segments
    max_turns: int | None = 8  # assistant turns
    max_user_turns: int | None = None  # what the user says after the prompt; see `user_turns.py`
    max_tool_calls: int | None = None  # calls that are run; further ones are answered with an error
    max_turn_tokens: int | None = None  # sampled tokens of one turn
    max_tool_response_tokens: int | None = 1024  # a longer result is cut in the middle and says so, see `truncation.py`
    deadline_s: float | None = None  # wall-clock seconds of the whole episode
    context: ContextLimit | None = None  # where the history is written anew, see `compaction.py`

    def __post_init__(self) -> None:
        for name in (
            "max_completion_length",
            "max_turns",
            "max_user_turns",
            "max_turn_tokens",
            "max_tool_response_tokens",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}; leave it out for no limit")
        if self.max_tool_calls is not None and self.max_tool_calls < 0:
            raise ConfigError(f"max_tool_calls must be at least 0, got {self.max_tool_calls}")
        if self.deadline_s is not None and self.deadline_s <= 0:
            raise ConfigError(f"the episode deadline must be a positive number of seconds, got {self.deadline_s}")
