"""The pairing of two lists that is worth most: each item is paired at most once.

Exact, by the Hungarian method with potentials, in a time that grows with the square of the shorter
list times the longer. scipy's `linear_sum_assignment` does the same and is the oracle of the tests;
it is no dependency of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf


def best_total(worth: Sequence[Sequence[float]]) -> float:
    """Return the largest sum of `worth[i][j]` over pairings of rows with columns; none is below 0."""
    if not worth or not worth[0]:
        return 0.0
    if len(worth) > len(worth[0]):
        worth = list(zip(*worth, strict=True))
    n, m = len(worth), len(worth[0])
    row_potential, column_potential = [0.0] * (n + 1), [0.0] * (m + 1)
    row_of = [0] * (m + 1)  # column -> its row, both from 1; 0: none
    for row in range(1, n + 1):
        row_of[0], column = row, 0
        least, came_from, done = [inf] * (m + 1), [0] * (m + 1), [False] * (m + 1)
        while row_of[column]:
            done[column] = True
            current, step, next_column = row_of[column], inf, 0
            for j in range(1, m + 1):
                if done[j]:
                    continue
                cost = -worth[current - 1][j - 1] - row_potential[current] - column_potential[j]
                if cost < least[j]:
                    least[j], came_from[j] = cost, column
                if least[j] < step:
                    step, next_column = least[j], j
            for j in range(m + 1):
                if done[j]:
                    row_potential[row_of[j]] += step
                    column_potential[j] -= step
                else:
                    least[j] -= step
            column = next_column
        while column:
            row_of[column] = row_of[came_from[column]]
            column = came_from[column]
    return sum(worth[row_of[j] - 1][j - 1] for j in range(1, m + 1) if row_of[j])
