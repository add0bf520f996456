"""Numbers for people: tokens, bytes, ages, durations."""

from __future__ import annotations

import time

from .palette import Glyphs


def tokens(count: int) -> str:
    """512, 5.9k, 24.8k, 1.2M."""
    if count < 1000:
        return str(count)
    if count < 1_000_000:
        return f"{count / 1000:.1f}k" if count < 99_950 else f"{count / 1000:.0f}k"
    return f"{count / 1_000_000:.1f}M"


def size(num_bytes: float) -> str:
    """101 MB, 4.4 GB (powers of 1000, as download pages count)."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.1f} {unit}" if num_bytes < 9.95 and unit != "B" else f"{num_bytes:.0f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def age(seconds: float) -> str:
    """now, 5m, 3h, 2d, 7w."""
    for limit, unit, divisor in ((60, "now", 0), (3600, "m", 60), (86_400, "h", 3600), (604_800, "d", 86_400)):
        if seconds < limit:
            return f"{int(seconds // divisor)}{unit}" if divisor else unit
    return f"{int(seconds // 604_800)}w"


def duration(seconds: float) -> str:
    """0.19 s, 4.2 s, 1:40."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds // 60)}:{int(seconds % 60):02d}"


def rough(seconds: float) -> str:
    """0 s, 0.03 s, 0.9 s, 14 s, 1:40: for estimates."""
    if seconds < 0.095:
        return f"{seconds:.2f} s" if seconds >= 0.005 else "0 s"
    return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s" if seconds < 60 else duration(seconds)


def clock(timestamp: float, now: float) -> str:
    """The time of day, with the date when it is not today's."""
    moment = time.localtime(timestamp)
    is_today = moment[:3] == time.localtime(now)[:3]
    return time.strftime("%H:%M" if is_today else "%d %b %H:%M", moment)


def blocks(count: int) -> str:
    """1 block, 1,234 blocks"""
    return f"{count:,} block{'' if count == 1 else 's'}"


def percent(share: float) -> str:
    """12 %; what is there never counts as nothing."""
    return "<1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def used_of(used_bytes: float, limit_bytes: float) -> str:
    """1.9/2.2 GB: the unit once where it is the same."""
    used, limit = size(used_bytes), size(limit_bytes)
    unit = limit.rpartition(" ")[2]
    return f"{used.removesuffix(' ' + unit) if used.endswith(' ' + unit) else used}/{limit}"


def gauge(share: float, cells: int, glyphs: Glyphs) -> str:
    full = min(cells, max(0, round(share * cells)))
    if share > 0 and full == 0:
        full = 1
    return glyphs.gauge_full * full + glyphs.gauge_empty * (cells - full)
