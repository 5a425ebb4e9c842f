"""What TRL's `_generate` returns, by name, and the one place that knows its order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolgrpo.trajectory import Message, Trajectory


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """What `_generate` gives to TRL, by name."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    mask: list[list[int]]
    completions: list[list[Message]]
    logprobs: list[list[float]] | None
    extra_fields: dict[str, list[Any]]

    @classmethod
    def from_trajectories(
        cls, trajectories: Sequence[Trajectory], pad_id: int, masks: Sequence[Sequence[int]] | None = None
    ) -> GenerationOutput:
        """Collect the columns; an empty completion gets a pad token that is not trained on.

        TRL wants at least one token per completion. `masks` say which tokens are trained on; without
        them it is those that were sampled.

        The messages are copies: a reward function that changes them changes no trajectory.
        """
        with_logprobs = all(trajectory.has_logprobs for trajectory in trajectories)
        return cls(
            prompt_ids=[list(t.prompt_ids) for t in trajectories],
            completion_ids=[list(t.ids) or [pad_id] for t in trajectories],
            mask=[list(mask) or [0] for mask in masks or [t.mask for t in trajectories]],
            completions=[t.completion() for t in trajectories],
            # Context tokens have no log-probability; TRL masks them, and wants a number there.
            logprobs=[[0.0 if lp is None else lp for lp in t.logprobs] or [0.0] for t in trajectories]
            if with_logprobs
            else None,
            extra_fields={"trajectories": list(trajectories)},
        )

    def as_trl(self) -> tuple[Any, ...]:
        """Return the tuple of TRL's `_generate`.

        It is (prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images,
        tool_images).
        """
        return (
            self.prompt_ids,
            self.completion_ids,
            self.mask,
            self.completions,
            self.logprobs,
            self.extra_fields,
            None,
            [],
        )
