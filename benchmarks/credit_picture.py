"""Draw what the turns of one episode get under each way to give credit: docs/images/credit.svg.

    python benchmarks/credit_picture.py

The group is made by hand: four episodes of one question of three calls. The numbers are those of `toolgrpo.credit`, with
`advantage: grpo`; the same bytes on every machine (`tests/credit/test_picture.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from toolgrpo.credit.episodes import EpisodeTurns
from toolgrpo.credit.options import Credit
from toolgrpo.signal.advantages import grouped_advantages

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "credit.svg"
WIDTH, ROW, LEFT, BAR = 860, 92, 190, 44


@dataclass(frozen=True, slots=True)
class Made:
    """One episode of the group: its outcome, its turns, and the state before each of them."""

    outcome: float
    turns: tuple[str, ...]
    call_ok: tuple[float, ...]
    gold_call: tuple[float, ...]
    states: tuple[str, ...]


THIRD = 1 / 3
GROUP = (
    Made(  # the one that is drawn: its second call fails, and it recovers
        1.0,
        ("add", "divide: error", "multiply", "subtract", "answer"),
        (1.0, -1 / 2, 2 / 3 - 1 / 2, 3 / 4 - 2 / 3, 0.0),
        (THIRD, 0.0, THIRD, THIRD, 0.0),
        ("0", "1", "1, error", "2", "3"),
    ),
    Made(
        1.0,
        ("add", "multiply", "subtract", "answer"),
        (1.0, 0.0, 0.0, 0.0),
        (THIRD, THIRD, THIRD, 0.0),
        ("0", "1", "2", "3"),
    ),
    Made(0.0, ("add", "answer too early"), (1.0, 0.0), (THIRD, 0.0), ("0", "1")),
    Made(
        0.0,
        ("add", "divide: error", "divide: error", "answer"),
        (1.0, -1 / 2, 1 / 3 - 1 / 2, 0.0),
        (THIRD, 0.0, 0.0, 0.0),
        ("0", "1", "1, error", "1, two errors"),
    ),
)


def ways() -> dict[str, tuple[float, ...]]:
    """The advantage of each turn of the first episode, by what was chosen."""
    outcomes = grouped_advantages([one.outcome for one in GROUP], len(GROUP), "grpo")

    def first(credit: Credit, rewards: list[tuple[float, ...]]) -> tuple[float, ...]:
        turns = [EpisodeTurns(one.outcome, of, one.states) for one, of in zip(GROUP, rewards, strict=True)]
        return credit.advantages(turns, len(GROUP), outcomes)[0]

    none = [(0.0,) * len(one.turns) for one in GROUP]
    return {
        "episode": first(Credit(), none),
        "turns, call_ok": first(Credit("turns", has_rewards=True), [one.call_ok for one in GROUP]),
        "turns, gold_call": first(Credit("turns", has_rewards=True), [one.gold_call for one in GROUP]),
        "anchor": first(Credit("anchor"), none),
    }


def svg() -> str:
    rows = ways()
    largest = max(abs(value) for of in rows.values() for value in of)
    step = (WIDTH - LEFT - 20) / len(GROUP[0].turns)
    height = 60 + ROW * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="14">',
        "<title>The advantages of the turns of one episode under each choice of credit</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for place, turn in enumerate(GROUP[0].turns):
        middle = LEFT + step * (place + 0.5)
        parts.append(f'<text x="{middle:.0f}" y="22" text-anchor="middle" fill="#666666">turn {place + 1}</text>')
        parts.append(f'<text x="{middle:.0f}" y="42" text-anchor="middle" fill="#111111">{turn}</text>')
    for number, (name, of) in enumerate(rows.items()):
        zero = 60 + ROW * number + ROW / 2
        parts.append(f'<text x="12" y="{zero + 5:.0f}" fill="#111111">{name}</text>')
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{zero:.0f}" y2="{zero:.0f}" stroke="#999999"/>')
        for place, value in enumerate(of):
            middle = LEFT + step * (place + 0.5)
            size = abs(value) / largest * (ROW / 2 - 20)
            top = zero - size if value > 0 else zero
            colour = "#2a7f62" if value > 0 else "#b3402a"
            parts.append(
                f'<rect x="{middle - BAR / 2:.1f}" y="{top:.1f}" width="{BAR}" height="{size:.1f}" fill="{colour}"/>'
            )
            text = zero - size - 5 if value >= 0 else zero + size + 15
            label = f"{value:+.2f}".replace("-", "\N{MINUS SIGN}")
            parts.append(f'<text x="{middle:.0f}" y="{text:.1f}" text-anchor="middle" fill="#111111">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(svg(), encoding="utf-8")
    for name, of in ways().items():
        print(f"{name:>18}", *(f"{value:+.2f}" for value in of))
