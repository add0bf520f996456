"""The tiers of the cache as gauges: how full, how many blocks, how much of a day's prompts came from there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..cache_records import CacheReport, TierUse
from . import format
from .kv_bar import tier_word
from .palette import Palette
from .width import Run, cell_len, fit, shorten

NAME_CELLS, GAUGE_CELLS, USED_CELLS = 6, 16, 15
STATES = {"off": "off", "opening": "being opened", "memory_only": "memory only"}
MODEL_STATES = {"loading": "a model is being loaded", "unloaded": "unloaded, a message loads it"}
MAX_SLABS = 3


def model_words(report: CacheReport) -> str:
    """`smollm2-135m · block 16 tok = 737 kB, fp32`, or why there is none."""
    if not report.model:
        return MODEL_STATES.get(report.model_state, "no model is loaded")
    size = f"{format.size(report.block_bytes)} {report.kv_dtype}".rstrip()
    return f"{report.model} · block {report.block_size} tok = {size}"


def tier_lines(report: CacheReport, device: str, width: int, palette: Palette) -> list[list[Run]]:
    """One line a tier, for the inspector; what the disk has to say comes below."""
    lines = []
    for name, use in _tiers(report):
        state = STATES.get(report.disk.state) if name == "disk" else None
        word = fit(tier_word(name, device), NAME_CELLS)
        if state:
            lines.append([(word, palette.tier(name)), (state, palette.warn)])
            continue
        line = [(word, palette.tier(name)), *_gauge(use, name, GAUGE_CELLS, palette)]
        line.append((f"  {fit(format.used_of(use.used_bytes, use.limit_bytes), USED_CELLS)}", palette.text))
        room = width - NAME_CELLS - GAUGE_CELLS - USED_CELLS - 2
        line.append((_fitting(_facts(report, use, name), room), palette.dim))
        lines.append(line)
        if name == "disk":
            lines += [[("      of which ", palette.dim), (text, palette.dim)] for text in _other_models(report)]
    if report.disk.notice:
        lines.append([(report.disk.notice, palette.warn)])
    return lines


def small_tier_lines(report: CacheReport, device: str, palette: Palette) -> list[list[Run]]:
    """As the chat list has room for: gauge and bytes."""
    lines = []
    for name, use in _tiers(report):
        state = STATES.get(report.disk.state) if name == "disk" else None
        line: list[Run] = [(fit(tier_word(name, device), 5), palette.dim)]
        if state:
            line.append((state, palette.dim))
        else:
            used = format.used_of(use.used_bytes, use.limit_bytes)
            line += [*_gauge(use, name, 8, palette), (f" {used}", palette.dim)]
        lines.append(line)
    return lines


def _tiers(report: CacheReport) -> Iterator[tuple[str, TierUse]]:
    """Without a model there is no device pool; without a service nothing is known of the disk."""
    if report.device.limit_bytes:
        yield "device", report.device
    if report.host is not None:
        yield "host", report.host
    if report.is_known:
        yield "disk", report.disk.use


def _gauge(use: TierUse, name: str, num_cells: int, palette: Palette) -> Sequence[Run]:
    """Filled with the tier's own glyph, as in the bars of the chains."""
    glyphs = palette.glyphs
    full = min(num_cells, max(use.used_bytes > 0, round(use.share * num_cells)))
    return [(glyphs.of_tier(name) * full, palette.tier(name)), (glyphs.kv_missing * (num_cells - full), palette.dim)]


def _facts(report: CacheReport, use: TierUse, name: str) -> list[str]:
    """The first ones matter most."""
    asked = report.prompt_tokens_24h
    facts = [format.blocks(use.num_blocks)]
    facts += [f"24 h {format.percent(use.hit_tokens_24h / asked)} of prompts"] if asked else []
    if name == "disk":
        disk = report.disk
        facts += [f"{disk.num_queued:,} to write"] if disk.num_queued else []
        facts += [f"{format.size(disk.written_today_bytes)} written today"] if disk.written_today_bytes else []
        facts += [f"reads {format.size(disk.read_bytes_per_s)}/s"] if disk.read_bytes_per_s else []
        facts += ["encrypted"] if disk.is_encrypted else []
    return facts


def _other_models(report: CacheReport) -> list[str]:
    others = [slab for slab in report.disk.slabs if not slab.is_open]
    others.sort(key=lambda slab: -slab.num_bytes)
    return [f"{slab.model}: {format.size(slab.num_bytes)}" for slab in others[:MAX_SLABS]]


def _fitting(facts: Sequence[str], width: int) -> str:
    while len(facts) > 1 and cell_len(" · ".join(facts)) > width:
        facts = facts[:-1]
    return shorten(" · ".join(facts), width)
