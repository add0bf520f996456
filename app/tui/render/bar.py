"""One row of chrome: something at the left, parts at the right that give way when the row is narrow."""

from __future__ import annotations

from collections.abc import Sequence

from .width import Run, cell_len, fit

Part = Sequence[Run]


def bar(left: Sequence[Part], right: Sequence[Part], width: int, gap: int = 2) -> list[Run]:
    """Exactly `width` cells. The first part of each side stays longest; a lone first part is cut with an ellipsis."""
    lefts, rights = [part for part in left if part], [part for part in right if part]
    while _needed(lefts, rights, gap) > width and len(lefts) + len(rights) > 1:
        if len(rights) > 1 or (rights and len(lefts) <= 1):
            rights.pop()
        else:
            lefts.pop()
    style = (lefts or rights)[0][0][1] if lefts or rights else None
    if style is None:
        return []
    if _needed(lefts, rights, gap) > width:
        return [(fit("".join(text for text, _ in (lefts or rights)[0]), width), style)]
    space = (" " * gap, style)
    runs = _joined(lefts, space)
    tail = _joined(rights, space)
    fill = width - sum(cell_len(text) for text, _ in [*runs, *tail])
    return [*runs, (" " * fill, style), *tail]


def _needed(lefts: Sequence[Part], rights: Sequence[Part], gap: int) -> int:
    parts = [*lefts, *rights]
    return sum(cell_len(text) for part in parts for text, _ in part) + gap * max(0, len(parts) - 1)


def _joined(parts: Sequence[Part], space: Run) -> list[Run]:
    runs: list[Run] = []
    for part in parts:
        runs += [space] if runs else []
        runs += part
    return runs
