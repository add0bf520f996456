"""Values with their standard errors as an SVG, one line each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT, TOP, LINE = 960, 330, 110, 78, 24
FONT = 'font-family="sans-serif"'


@dataclass(frozen=True, slots=True)
class Interval:
    name: str
    bits: float
    """A weight."""
    growth: float
    """Of perplexity, percent."""
    error: float
    """Standard error of that."""
    agreement: float
    """Positions with the same most likely token, percent."""


def draw_intervals(title: str, rows: Sequence[Interval]) -> str:
    height = TOP + LINE * len(rows) + 16
    lowest = min(0.0, *(row.growth - row.error for row in rows))
    highest = max(row.growth + row.error for row in rows)
    scale = (WIDTH - LEFT - RIGHT) / (highest - lowest)

    def x(value: float) -> float:
        return LEFT + (value - lowest) * scale

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {FONT}>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="26" font-size="17" fill="#222222">{escape(title)}</text>',
        '<text x="16" y="58" font-size="12" fill="#444444">format, scales, bits a weight</text>',
        f'<text x="{x(0):.1f}" y="58" font-size="12" fill="#444444">growth in percent, standard error</text>',
        f'<text x="{WIDTH - RIGHT + 16}" y="58" font-size="12" fill="#444444">same top token</text>',
        f'<rect x="{x(0) - 0.5:.1f}" y="{TOP - 12}" width="1" height="{LINE * len(rows)}" fill="#999999"/>',
    ]
    for index, row in enumerate(rows):
        y = TOP + LINE * index
        start, end, middle = x(row.growth - row.error), x(row.growth + row.error), x(row.growth)
        label = f"{row.name}, {row.bits:.2f}"
        lines += [
            f'<text x="16" y="{y + 4}" font-size="13" fill="#222222">{escape(label)}</text>',
            f'<rect x="{start:.1f}" y="{y - 2}" width="{end - start:.1f}" height="4" fill="#9ecae9"/>',
            f'<circle cx="{middle:.1f}" cy="{y}" r="5" fill="#4c78a8"><title>{row.growth:+.2f} %</title></circle>',
            f'<text x="{WIDTH - RIGHT + 16}" y="{y + 4}" font-size="13" fill="#222222">{row.agreement:.1f} %</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])
