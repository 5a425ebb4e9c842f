"""What a run says of itself while it runs: the fields that `ToolGRPOConfig` has for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from toolgrpo.errors import ConfigError


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
