"""The chains of the cache as a tree: what chats share stands once, above those that share it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..cache_records import CacheReport, Chain, SharedHead
from .chain_row import ChainRow
from .kv_bar import first_blocks, skip_blocks
from .palette import Glyphs

SORTS: dict[str, Callable[[Chain], float]] = {
    "last use": lambda chain: -chain.last_used_at,
    "tokens": lambda chain: -chain.num_tokens,
    "time saved": lambda chain: (chain.resume_s or 0.0) - (chain.compute_s or 0.0),
}


@dataclass(frozen=True)
class _Node:
    head: SharedHead
    chains: tuple[Chain, ...]
    """All below, also those under a longer head."""


def chain_rows(report: CacheReport, sort: str, now: float, glyphs: Glyphs) -> list[ChainRow]:
    """One row a chain, in the order of `sort` (a key of `SORTS`); each head above its chains."""
    order = SORTS[sort]
    nodes = []
    for head in report.shared:
        chains = tuple(chain for chain in report.chains if chain.chat_id in head.chat_ids)
        if len(chains) > 1:
            nodes.append(_Node(head, chains))
    longest = max((sum(count for _, count in chain.runs) for chain in report.chains), default=0)
    rows = _level(report.chains, nodes, 0, order)
    return [replace(row.stamped(now), longest=longest) for row in _drawn(rows, "", glyphs, is_top=True)]


Level = list[tuple[ChainRow, "Level"]]
"""Rows, each with those below it."""


def _level(chains: Sequence[Chain], nodes: Sequence[_Node], num_drawn: int, order: Callable[[Chain], float]) -> Level:
    """The widest heads among `chains`, and the chains that are in none; `num_drawn` blocks stand above already."""
    level: list[tuple[float, ChainRow, Level]] = []
    rest, left = list(chains), sorted(nodes, key=lambda node: (node.head.num_blocks, -len(node.chains)))
    while left:
        node, *left = left
        ids = {chain.chat_id for chain in node.chains}
        inside = [other for other in left if ids >= {chain.chat_id for chain in other.chains}]
        left = [other for other in left if other not in inside]
        members = [chain for chain in rest if chain.chat_id in ids]
        if len(members) < 2:  # Chats of two heads that do not lie in one another: drawn under the first.
            continue
        rest = [chain for chain in rest if chain.chat_id not in ids]
        below = _level(members, inside, node.head.num_blocks, order)
        level.append((min(map(order, members)), _head_row(node.head, members, num_drawn), below))
    level += [(order(chain), _chain_row(chain, num_drawn), []) for chain in rest]
    level.sort(key=lambda entry: entry[0])
    return [(row, below) for _, row, below in level]


def _drawn(level: Level, prefix: str, glyphs: Glyphs, *, is_top: bool = False) -> Iterator[ChainRow]:
    for index, (row, below) in enumerate(level):
        is_last = index == len(level) - 1
        if is_top:
            lead, deeper = "", ""
        else:
            lead = f"{prefix}{glyphs.last_fork if is_last else glyphs.fork} "
            deeper = prefix + ("  " if is_last else f"{glyphs.cell_bar} ")
        yield replace(row, lead=lead)
        yield from _drawn(below, deeper, glyphs)


def _head_row(head: SharedHead, members: Sequence[Chain], num_drawn: int) -> ChainRow:
    runs = skip_blocks(first_blocks(members[0].runs, head.num_blocks), num_drawn)
    is_running = any(chain.is_running for chain in members)
    return ChainRow(
        head.label,
        head.num_tokens,
        runs,
        num_chats=len(members),
        last_used_at=max(chain.last_used_at for chain in members),
        is_running=is_running,
    )


def _chain_row(chain: Chain, num_drawn: int) -> ChainRow:
    return ChainRow(
        chain.title,
        chain.num_tokens,
        skip_blocks(chain.runs, num_drawn),
        chat_id=chain.chat_id,
        num_chats=1,
        last_used_at=chain.last_used_at,
        resume_s=chain.resume_s,
        compute_s=chain.compute_s,
        is_running=chain.is_running,
        num_damaged=chain.num_damaged,
        is_pinned=chain.is_pinned,
        is_private=chain.is_private,
    )
