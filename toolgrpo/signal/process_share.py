"""Which groups of a step belong to which process, where each of them draws whole groups.

TRL gives every process equally many rows, in one piece, so a group may lie in two of them. Here a
process runs whole groups of its own, and waits for no other; the rows go where TRL wants them
afterwards.

The groups of a step are numbered over all processes: first those it begins with, `n_groups` of
them, then those that are drawn besides, which the processes take in turn.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProcessShare:
    """The share of one process in the groups of a step."""

    n_groups: int
    n_processes: int = 1
    process: int = 0

    @property
    def own(self) -> range:
        """Return the numbers of the groups that this process begins with."""
        return self._of(self.process)

    def number(self, group: int) -> int:
        """Return the number, over all processes, of the group that this one submits as its n-th."""
        if group < len(self.own):
            return self.own[group]
        owners = [process for process in range(self.n_processes) if self._of(process)]
        return self.n_groups + (group - len(self.own)) * len(owners) + owners.index(self.process)

    @property
    def largest(self) -> int:
        """Return how many groups the process with the most of them begins with."""
        return max(len(self._of(process)) for process in range(self.n_processes))

    def n_planned(self, extra: int) -> int:
        """Return how many numbers there are if no process draws more than `extra` besides its own."""
        return self.n_groups + extra * sum(1 for process in range(self.n_processes) if self._of(process))

    def _of(self, process: int) -> range:
        def first(of: int) -> int:
            return -(-of * self.n_groups // self.n_processes)

        return range(first(process), first(process + 1))
