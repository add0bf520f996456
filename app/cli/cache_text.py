"""What `chatkv cache` prints for people."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from chatkv.app.hub.reports import human_bytes
from chatkv.app.tui.cache_records import TIERS, CacheReport, Chain, DiskUse, Reuse, SharedHead, TierUse
from chatkv.app.tui.render import format
from chatkv.app.tui.render.kv_bar import kv_bar
from chatkv.app.tui.render.miss import reuse_text
from chatkv.app.tui.render.palette import Glyphs

from .output import human_age

GAUGE_CELLS = 16
WIDE_CELLS, WIDE_BAR_CELLS, NARROW_BAR_CELLS = 96, 16, 10
ID_CHARACTERS = 8
_NAME_CELLS = 12
_GLYPHS = Glyphs()
_DISK_STATES = {
    "off": "off by setting",
    "opening": "being opened",
    "memory_only": "not used: everything stays in memory",
}
_MODEL_STATES = {"loading": "being loaded", "unloaded": "unloaded, a prompt loads it"}
_STYLES = {"device": "green", "host": "yellow", "disk": "cyan", "missing": "bright_black"}


def print_status(cache: Mapping[str, Any], directory: str) -> None:
    report = CacheReport.from_json(cache)
    console = Console()
    for name, value in _status_lines(report, directory):
        console.print(Text(f"{name:<{_NAME_CELLS}} ") + value, soft_wrap=True)


def _status_lines(report: CacheReport, directory: str) -> Iterator[tuple[str, Text]]:
    yield "model", Text(_model_words(report))
    yield "device", _tier_line("device", report.device, report) if report.model else Text("empty")
    yield "host", _tier_line("host", report.host, report) if report.host else Text("off (for a GPU only)")
    yield "disk", _disk_line(report)
    if report.prompt_tokens_24h:
        yield "computed", Text(f"{_share(report.computed_tokens_24h, report)} of a day's prompt tokens")
    if report.disk.state == "on":
        yield "written", Text(_written(report.disk))
        yield "store", Text(f"{directory}{', encrypted' if report.disk.is_encrypted else ''}")
    for slab in report.disk.slabs:
        age = human_age(time.time() - slab.last_used_at)
        used = "in use now" if slab.is_open else "last used just now" if age == "now" else f"last used {age} ago"
        yield "", Text(f"{slab.model}: {format.blocks(slab.num_blocks)}, {human_bytes(slab.num_bytes)}, {used}")
    if report.disk.notice:
        yield "notice", Text(report.disk.notice)


def _model_words(report: CacheReport) -> str:
    if not report.model:
        return _MODEL_STATES.get(report.model_state, "none is loaded")
    size = f"{human_bytes(report.block_bytes)} {report.kv_dtype}".rstrip()
    return f"{report.model}, blocks of {report.block_size} tokens = {size}"


def _disk_line(report: CacheReport) -> Text:
    if report.disk.state == "on":
        return _tier_line("disk", report.disk.use, report)
    return Text(_DISK_STATES.get(report.disk.state, report.disk.state))


def _tier_line(tier: str, use: TierUse, report: CacheReport) -> Text:
    full = min(GAUGE_CELLS, max(int(use.used_bytes > 0), round(GAUGE_CELLS * use.share)))
    text = Text().append(_GLYPHS.of_tier(tier) * full, _STYLES[tier])
    text.append(_GLYPHS.rule * (GAUGE_CELLS - full), "bright_black")
    text.append(f"  {human_bytes(use.used_bytes)} of {human_bytes(use.limit_bytes)}, {format.blocks(use.num_blocks)}")
    if report.prompt_tokens_24h:
        text.append(f", {_share(use.hit_tokens_24h, report)} of a day's prompt tokens")
    return text


def _share(num_tokens: int, report: CacheReport) -> str:
    return format.percent(num_tokens / report.prompt_tokens_24h)


def _written(disk: DiskUse) -> str:
    parts = [f"{human_bytes(disk.written_today_bytes)} today"]
    if disk.num_queued:
        parts.append(f"{format.blocks(disk.num_queued)} waiting")
    if disk.read_bytes_per_s:
        parts.append(f"reads at {human_bytes(disk.read_bytes_per_s)}/s")
    return ", ".join(parts)


def print_chats(report: CacheReport) -> None:
    """The table on a terminal: where each chat's blocks lie, first to last."""
    console = Console()
    bar_cells = WIDE_BAR_CELLS if console.width >= WIDE_CELLS else NARROW_BAR_CELLS
    table = Table(box=None, pad_edge=False)
    table.add_column("id", no_wrap=True)
    table.add_column("chat", min_width=8)  # The one that gives way.
    for name in ("tokens", "resume", "compute", "used"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("blocks", no_wrap=True)
    table.add_column("", no_wrap=True)
    for chain in report.chains:
        table.add_row(
            chain.chat_id[:ID_CHARACTERS],
            Text(chain.title, no_wrap=True, overflow="ellipsis"),
            f"{chain.num_tokens:,}",
            _seconds(chain.resume_s),
            _seconds(chain.compute_s),
            human_age(time.time() - chain.last_used_at),
            _bar(chain, bar_cells),
            ", ".join(_notes(chain)),
        )
    console.print(table)
    console.print(_legend())
    for head in report.shared:
        console.print(Text(_shared(head)), soft_wrap=True)
    for chain in report.chains:
        if chain.chat_id == report.evicts_next:
            console.print(Text(f"Evicted next: {chain.title}"), soft_wrap=True)


def chat_fields(chain: Chain, report: CacheReport) -> tuple[str, ...]:
    """The same for a pipe: blocks in each tier and missing, seconds, notes."""
    counts = (str(chain.num_by_tier.get(tier, 0)) for tier in (*TIERS, "missing"))
    times = ("" if value is None else f"{value:.3f}" for value in (chain.resume_s, chain.compute_s))
    notes = ", ".join([*_notes(chain), *(["evicted next"] if chain.chat_id == report.evicts_next else [])])
    return (chain.chat_id, chain.title, str(chain.num_tokens), *counts, *times, notes)


def _bar(chain: Chain, most_cells: int) -> Text:
    num_cells = min(most_cells, sum(chain.num_by_tier.values()))
    return Text.assemble(*((text, _STYLES[tier]) for text, tier in kv_bar(chain.runs, num_cells, _GLYPHS)))


def _legend() -> Text:
    text = Text()
    for tier in (*TIERS, "missing"):
        text.append(_GLYPHS.of_tier(tier), _STYLES[tier]).append(f" {tier}  ")
    text.rstrip()
    return text


def _seconds(value: float | None) -> str:
    return "" if value is None else format.duration(value)


def _notes(chain: Chain) -> list[str]:
    flags = {
        "running": chain.is_running,
        "pinned": chain.is_pinned,
        "private": chain.is_private,
        f"{chain.num_damaged} damaged": chain.num_damaged > 0,
    }
    return [word for word, is_set in flags.items() if is_set]


def _shared(head: SharedHead) -> str:
    return f"{len(head.chat_ids)} chats share {head.num_tokens:,} tokens, kept once: {head.label}"


def why_lines(request: Mapping[str, Any] | None) -> list[str]:
    """How far a request's prompt was reused, and the two texts where it left what was kept."""
    if request is None:
        return ["Nothing was asked since the service was started, or it is forgotten."]
    reuse = Reuse.from_json(request)
    tiers = ", ".join(f"{count:,} from {tier}" for tier, count in (request["cached_by_tier"] or {}).items() if count)
    found = f"{reuse.num_cached_tokens:,} of {reuse.num_prompt_tokens:,} prompt tokens were reused"
    lines = [f"{found}{f' ({tiers})' if tiers else ''}."]
    if load := request["load"]:
        lines.append(_load_line(load))
    miss = reuse.miss
    if miss is None or reuse.num_recomputed_tokens == 0 or not miss.expected_text:
        words = reuse_text(reuse)
        return [*lines, f"{words[0].upper()}{words[1:]}."]
    return [
        *lines,
        f"At token {miss.position:,} it left what was kept:",
        f"  after   {_quoted(miss.text_before)}",
        f"  kept    {_quoted(miss.expected_text)}",
        f"  prompt  {_quoted(miss.text)}",
    ]


def _load_line(load: Mapping[str, Any]) -> str:
    times = f"{format.duration(load['load_s'])} against {format.duration(load['compute_s'])} to compute them"
    what = f"{load['num_loaded_tokens']:,} were loaded" if load["is_loaded"] else "they were computed"
    return f"{load['num_tokens']:,} tokens lay below the device; loading was to take {times}: {what}."


def _quoted(text: str) -> str:
    return f"“{text}”"
