"""The chains of the cache as a tree: what chats share stands once, above those that share it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..cache_records import CacheReport, Chain, SharedHead
from .chain_row import ChainRow
from .kv_bar import first_blocks, skip_blocks
from .palette import Glyphs

Order = Callable[[Chain], float]
MIN_MEMBERS = 2
"""Fewer share nothing."""
MAX_DEPTH = 8
"""Heads in one another that are drawn; chains of deeper ones stand under the last of these."""
SORTS: dict[str, Order] = {
    "last use": lambda chain: -chain.last_used_at,
    "tokens": lambda chain: -chain.num_tokens,
    "time saved": lambda chain: (chain.resume_s or 0.0) - (chain.compute_s or 0.0),
}


@dataclass
class _Branch:
    """A head, or the top of the tree where `head` is None, with what stands below it."""

    head: SharedHead | None = None
    num_drawn: int = 0
    """Blocks that stand above it already."""
    heads: list[_Branch] = field(default_factory=list)
    chains: list[Chain] = field(default_factory=list)

    def all_chains(self) -> list[Chain]:
        return [*self.chains, *(chain for branch in self.heads for chain in branch.all_chains())]

    @property
    def num_blocks(self) -> int:
        return self.head.num_blocks if self.head else 0


def chain_rows(report: CacheReport, sort: str, now: float, glyphs: Glyphs) -> list[ChainRow]:
    """One row a chain, in the order of `sort` (a key of `SORTS`); each head above its chains."""
    longest = max((sum(count for _, count in chain.runs) for chain in report.chains), default=0)
    level = _level(_tree(report), SORTS[sort])
    return [replace(row.stamped(now), longest=longest) for row in _drawn(level, "", glyphs, is_top=True)]


def _tree(report: CacheReport) -> _Branch:
    """Each chain under the longest head that it begins with, each head under the next shorter one of its chains."""
    top = _Branch()
    by_chat = {chain.chat_id: [top] for chain in report.chains}
    for head in sorted(report.shared, key=lambda head: head.num_blocks):
        members = [chat_id for chat_id in head.chat_ids if chat_id in by_chat]
        if len(members) < MIN_MEMBERS or len(by_chat[members[0]]) > MAX_DEPTH:
            continue
        above = by_chat[members[0]][-1]
        branch = _Branch(head, above.num_blocks)
        above.heads.append(branch)
        for chat_id in members:
            by_chat[chat_id].append(branch)
    for chain in report.chains:
        by_chat[chain.chat_id][-1].chains.append(chain)
    return top


Level = list[tuple[ChainRow, "Level"]]
"""Rows, each with those below it."""


def _level(branch: _Branch, order: Order) -> Level:
    level: list[tuple[float, ChainRow, Level]] = []
    for below in branch.heads:
        chains = below.all_chains()
        level.append((min(map(order, chains)), _head_row(below, chains), _level(below, order)))
    level += [(order(chain), _chain_row(chain, branch.num_blocks), []) for chain in branch.chains]
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


def _head_row(branch: _Branch, chains: Sequence[Chain]) -> ChainRow:
    assert branch.head is not None
    return ChainRow(
        branch.head.label,
        branch.head.num_tokens,
        skip_blocks(first_blocks(chains[0].runs, branch.head.num_blocks), branch.num_drawn),
        num_chats=len(chains),
        last_used_at=max(chain.last_used_at for chain in chains),
        is_running=any(chain.is_running for chain in chains),
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
