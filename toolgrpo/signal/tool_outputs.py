"""The tool-output loss (ECHO, arXiv 2605.24517): cross-entropy on what tools said.

    loss = policy loss + echo_weight * sum over marked tokens of -log p(token) / number of them

Marked are the tokens of the text of good tool results that a later turn reads; never role tags,
errors, prompts or what the model itself said. The number is that of the whole generation batch, and
the policy loss keeps its own: neither dilutes the other. It teaches also where all rewards of a
group are alike.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from math import isfinite

from toolgrpo.errors import ConfigError
from toolgrpo.trajectory import Trajectory

__all__ = ["ToolOutputOptions", "output_mask"]


@dataclass
class ToolOutputOptions:
    """Fields of a config about the tool-output loss."""

    echo_weight: float = field(
        default=0.0,
        metadata={"help": "Weight of the cross-entropy on the text of tool results that a later turn reads; 0: none."},
    )
    echo_tools: list[str] | None = field(
        default=None, metadata={"help": "The tools whose results echo_weight counts; default: all."}
    )

    def check_tool_outputs(self) -> None:
        """Raise ConfigError for values that cannot work."""
        if not (isfinite(self.echo_weight) and 0 <= self.echo_weight <= 1):
            raise ConfigError(f"echo_weight must be between 0 and 1, got {self.echo_weight}")
        if self.echo_tools is not None and not self.echo_weight:
            raise ConfigError("echo_tools is given, but echo_weight is 0, so nothing would be learned from them")

    def check_tools(self, names: Collection[str]) -> None:
        """Raise ConfigError if the tools that are asked for are not there, or none is."""
        if self.echo_weight and not names:
            raise ConfigError("echo_weight needs tools whose results can be read, and there are none; leave it out")
        unknown = [name for name in self.echo_tools or () if name not in names]
        if unknown:
            raise ConfigError(f"echo_tools names {unknown[0]!r}, which is no tool of this run: {', '.join(names)}")


def output_mask(trajectory: Trajectory, tools: Collection[str] | None) -> list[int]:
    """Return 1 on the tokens of good results of these tools (None: of all) that a later turn reads."""
    mask = [0] * len(trajectory.ids)
    last_turn = trajectory.turns[-1].start if trajectory.turns else 0
    for output in trajectory.outputs:
        if output.ok and output.end <= last_turn and (tools is None or output.tool in tools):
            mask[output.start : output.end] = [1] * (output.end - output.start)
    return mask
