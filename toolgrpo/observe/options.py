"""What a run records: the fields that `ToolGRPOConfig` has for it."""

from __future__ import annotations

from argparse import ArgumentTypeError
from dataclasses import dataclass, field
from typing import Any, Self

from pydantic_core import core_schema

from toolgrpo.errors import ConfigError

# What a run says of itself while it runs: the fields that `ToolGRPOConfig` has for it.


@dataclass
class WatchOptions:
    """The fields; `check_watch` refuses what is impossible."""

    quiet: bool = field(default=False, metadata={"help": "Show nothing but errors: no lines, no bar, no warnings."})
    doctor_every: int = field(
        default=20,
        metadata={"help": "Steps until the same trouble of a run is told again; 0: no trouble is told."},
    )
    max_world_failures: float | None = field(
        default=0.5,
        metadata={
            "help": "Share of a rollout's episodes that the world may fail (engine lost, tool timed out or died) before "
            "the run stops."
        },
    )

    def check_watch(self) -> None:
        if self.doctor_every < 0:
            raise ConfigError(f"doctor_every must be a number of steps, 0 or more, got {self.doctor_every}")
        share = self.max_world_failures
        if share is not None and not 0 < share <= 1:
            raise ConfigError(f"max_world_failures must be a share above 0 and at most 1, or none; got {share}")


class RecordedShare(float):
    """A share between 0 and 1; true means all and false none, as text too."""

    def __new__(cls, value: Any) -> Self:
        number = {"true": 1.0, "false": 0.0}.get(str(value).lower())
        if number is None:
            try:
                number = float(value)
            except (TypeError, ValueError):
                number = -1.0
        if not 0 <= number <= 1:
            raise ArgumentTypeError(
                f"must be true or false, or the share of the groups that is recorded, as 0.1; got {value!r}"
            )
        return super().__new__(cls, number)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(cls._validated)

    @classmethod
    def _validated(cls, value: Any) -> Self:
        try:
            return cls(value)
        except ArgumentTypeError as error:
            raise ValueError(str(error)) from error


@dataclass
class RecordingOptions:
    """The fields; `check` makes true and false a share, and refuses what is none."""

    record_episodes: RecordedShare = field(
        default=RecordedShare(True),
        metadata={
            "help": "Write every trajectory to OUTPUT_DIR/episodes.jsonl (docs/reference/episodes.md): true, false, or a share of "
            "the groups, as 0.1."
        },
    )
    record_tokens: int = field(
        default=4,
        metadata={
            "help": "Of so many episodes of each step write what training saw of each token: log-probability, entropy, "
            "correction."
        },
    )

    def check_recording(self) -> None:
        try:
            self.record_episodes = RecordedShare(self.record_episodes)
        except ArgumentTypeError as error:
            raise ConfigError(f"record_episodes {error}") from None
        if self.record_tokens < 0:
            raise ConfigError(f"record_tokens must be a number of episodes, 0 or more, got {self.record_tokens}")
