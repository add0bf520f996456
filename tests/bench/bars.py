"""Stacked bars as an SVG, each with a mark for its limit. Every bar has its own scale: parts are read as shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#4c78a8", "#72b7b2", "#54a24b", "#eeca3b", "#e45756", "#b279a2", "#9d755d", "#bab0ac")
WIDTH, LEFT, TOP, BAR, GAP = 960, 16, 84, 30, 40
FONT = 'font-family="sans-serif"'
MIN_SHARE_WITH_NUMBER = 0.05


@dataclass(frozen=True, slots=True)
class Bar:
    name: str
    parts: Mapping[str, float]
    limit: float


def draw_bars(title: str, unit: str, bars: Sequence[Bar]) -> str:
    height = TOP + len(bars) * (BAR + GAP) + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {FONT}>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="26" font-size="17" fill="#222222">{escape(title)}</text>',
        *_legend(list(bars[0].parts)),
    ]
    for index, bar in enumerate(bars):
        lines += _bar(bar, unit, TOP + index * (BAR + GAP))
    return "\n".join([*lines, "</svg>", ""])


def _legend(parts: Sequence[str]) -> list[str]:
    lines, x = [], LEFT
    for part, colour in zip(parts, COLOURS, strict=True):
        lines.append(f'<rect x="{x}" y="42" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{x + 16}" y="53" font-size="12" fill="#444444">{escape(part)}</text>')
        x += 34 + 7 * len(part)
    lines.append(f'<rect x="{x}" y="40" width="3" height="16" fill="#111111"/>')
    lines.append(f'<text x="{x + 8}" y="53" font-size="12" fill="#444444">the machine\'s limit</text>')
    return lines


def _bar(bar: Bar, unit: str, top: float) -> list[str]:
    whole = sum(bar.parts.values())
    scale = (WIDTH - 2 * LEFT) / max(whole, bar.limit)
    label = f"{bar.name}: {whole:.3g} {unit} (limit {bar.limit:.3g} {unit})"
    lines = [f'<text x="{LEFT}" y="{top + 12}" font-size="13" fill="#222222">{escape(label)}</text>']
    x = float(LEFT)
    for (part, value), colour in zip(bar.parts.items(), COLOURS, strict=True):
        width = value * scale
        tip = f"<title>{escape(part)}: {value:.3g} {unit}</title>"
        lines.append(
            f'<rect x="{x:.1f}" y="{top + 18}" width="{width:.1f}" height="{BAR}" fill="{colour}">{tip}</rect>'
        )
        if value >= MIN_SHARE_WITH_NUMBER * whole:
            middle = f'x="{x + width / 2:.1f}" y="{top + 38}" text-anchor="middle"'
            lines.append(f'<text {middle} font-size="12" fill="#ffffff">{value:.3g}</text>')
        x += width
    lines.append(
        f'<rect x="{LEFT + bar.limit * scale - 1.5:.1f}" y="{top + 15}" width="3" height="{BAR + 6}" fill="#111111"/>'
    )
    return lines
