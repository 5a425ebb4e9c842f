"""Which of several servers a request goes to: the one that has most of its tokens cached,
unless that one is overloaded.

Each turn of an episode extends the turn before, and the episodes of a group share their prompt;
both should find their prefix where it was computed. Prompts that only share a system prompt and
tool schemas should spread. So a server is preferred if it saw at least half of the request's
tokens, and else the least busy one is taken.

Pure bookkeeping: it knows no HTTP and no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

_BLOCK = 32  # tokens; two requests with fewer in common share nothing worth keeping together
_SLACK = 8  # requests that a preferred server may have more than twice the least busy one's


class PrefixRouter:
    """Chooses servers by number, 0 to n - 1, and keeps count of what is open where."""

    def __init__(self, n_servers: int) -> None:
        self.open_requests = [0] * n_servers
        self._seen_at: dict[int, int] = {}  # the hash of a prefix, to the server that saw it last

    def choose(self, ids: Sequence[int], avoid: Collection[int] = ()) -> int:
        """Return the server for a request.

        `avoid` holds those that are down (if all are, none is avoided).
        """
        if len(self.open_requests) == 1:
            return 0
        candidates = [n for n in range(len(self.open_requests)) if n not in avoid] or range(len(self.open_requests))
        least_busy = min(candidates, key=lambda n: self.open_requests[n])
        prefixes = _prefix_hashes(ids)
        chosen = least_busy
        for n_blocks in range(len(prefixes), 0, -1):
            known = self._seen_at.get(prefixes[n_blocks - 1])
            if known is not None:
                long_enough = 2 * n_blocks * _BLOCK >= len(ids)
                if known in candidates and long_enough and not self._overloaded(known, least_busy):
                    chosen = known
                break
        for prefix in prefixes:
            self._seen_at[prefix] = chosen
        return chosen

    def _overloaded(self, server: int, least_busy: int) -> bool:
        return self.open_requests[server] > 2 * self.open_requests[least_busy] + _SLACK


def _prefix_hashes(ids: Sequence[int]) -> list[int]:
    """Return one hash per whole block, of everything up to its end."""
    hashes, so_far = [], 0
    for end in range(_BLOCK, len(ids) + 1, _BLOCK):
        so_far = hash((so_far, *ids[end - _BLOCK : end]))
        hashes.append(so_far)
    return hashes
