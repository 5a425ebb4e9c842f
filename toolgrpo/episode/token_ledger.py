"""The growing side of a trajectory: what an episode writes its tokens into.

Invariants:

* Tokens enter a `Ledger` through three verbs only: `sampled(ids, logprobs)` (mask 1), `context(ids)`
  (mask 0), and `rewrite(prompt_ids)`, which begins a new segment (mask 0). The mask is recorded
  where a token is born; nothing here ever derives it from lengths.
* What the engine is asked to continue, `all_ids`, is the prompt and everything after it of the
  segment that is written.
* `finish` turns the ledger into a frozen `Trajectory`, once; after that no verb works.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolgrpo.episode.dropped import Drop
from toolgrpo.episode.segments import SegmentStart
from toolgrpo.episode.trajectory import Message, StopReason, Trajectory, Turn


class Ledger:
    """The growing side of a trajectory. One writer: the episode."""

    def __init__(self, prompt_ids: Sequence[int], *, expects_logprobs: bool = True) -> None:
        if not prompt_ids:
            raise ValueError("a ledger needs a prompt of at least one token")
        self._prompt_ids = tuple(prompt_ids)
        self._all_ids = list(prompt_ids)  # of the segment that is written
        self._before: list[int] = []  # the row up to that segment, where it is not the first
        self._starts: list[SegmentStart] = []
        self._n_prompts = 0  # tokens of the prompts of later segments
        self._mask: list[int] = []
        self._logprobs: list[float | None] = []
        self._messages: list[Message] = []
        self._turns: list[Turn] = []
        self._expects_logprobs = expects_logprobs
        self._done = False

    def __len__(self) -> int:
        """Return how many tokens stand after the prompt, the prompts of later segments included."""
        return len(self._mask)

    @property
    def n_added(self) -> int:
        """Return how many tokens were sampled or added; the prompts of later segments are neither."""
        return len(self._mask) - self._n_prompts

    @property
    def all_ids(self) -> list[int]:
        """Return the prompt and everything after it: exactly what the engine is asked to continue.

        Of the segment that is written. Do not change it.
        """
        return self._all_ids

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(self._turns)

    def sampled(self, ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        """Add tokens that the model said, each with its log-probability.

        None only for an engine that gives none.
        """
        self._check_open()
        if logprobs is None and self._expects_logprobs and ids:
            raise ValueError(f"the engine gives log-probabilities, but {len(ids)} sampled tokens came without them")
        if logprobs is not None and len(logprobs) != len(ids):
            raise ValueError(f"{len(ids)} sampled tokens came with {len(logprobs)} log-probabilities")
        if logprobs is not None and None in logprobs:
            raise ValueError(f"a log-probability is missing among those of {len(ids)} sampled tokens")
        self._all_ids.extend(ids)
        self._mask.extend([1] * len(ids))
        self._logprobs.extend([None] * len(ids) if logprobs is None else logprobs)

    def context(self, ids: Sequence[int]) -> None:
        """Add tokens that the model did not say: tool results, turn markers, a made-up close."""
        self._check_open()
        self._all_ids.extend(ids)
        self._mask.extend([0] * len(ids))
        self._logprobs.extend([None] * len(ids))

    def rewrite(self, prompt_ids: Sequence[int]) -> None:
        """Begin a new segment, which goes on from the one before with another prompt."""
        self._check_open()
        if not prompt_ids:
            raise ValueError("a segment needs a prompt of at least one token")
        self._before = self._row()
        self._starts.append(SegmentStart(len(self._before), len(prompt_ids), parent=len(self._starts)))
        self._n_prompts += len(prompt_ids)
        self._all_ids = list(prompt_ids)
        self._mask.extend([0] * len(prompt_ids))
        self._logprobs.extend([None] * len(prompt_ids))

    def _row(self) -> list[int]:
        own = self._all_ids if self._starts else self._all_ids[len(self._prompt_ids) :]
        return [*self._before, *own]

    def say(self, *messages: Message) -> None:
        """Add messages as the reward function will see them."""
        self._check_open()
        self._messages.extend(messages)

    def turn(self, turn: Turn) -> None:
        self._check_open()
        self._turns.append(turn)

    def finish(
        self,
        stop_reason: StopReason,
        *,
        started_s: float = 0.0,
        duration_s: float = 0.0,
        failure: str | None = None,
        reward: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        dropped: Drop | None = None,
    ) -> Trajectory:
        """Close the ledger and freeze what is in it."""
        self._check_open()
        self._done = True
        return Trajectory(
            prompt_ids=self._prompt_ids,
            ids=tuple(self._row()),
            mask=tuple(self._mask),
            logprobs=tuple(self._logprobs),
            messages=tuple(self._messages),
            turns=tuple(self._turns),
            stop_reason=stop_reason,
            started_s=started_s,
            duration_s=duration_s,
            failure=failure,
            reward=reward,
            metadata=dict(metadata or {}),
            dropped=dropped,
            segment_starts=tuple(self._starts),
        )

    def _check_open(self) -> None:
        if self._done:
            raise ValueError("this ledger is finished; a trajectory is immutable")
