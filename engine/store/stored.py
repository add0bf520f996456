"""Index rows as the copies of a tier: parents before children, nothing without its parent."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any

from ..tiers.tier import BlockRecord, CopyState, TierCopy
from .cipher import Cipher
from .record import BadRecordError


def build_copies(rows: Sequence[tuple[Any, ...]], num_slots: int) -> tuple[list[TierCopy], list[int]]:
    """`rows`: fields as in BlockRow, ids in the clear. The second list names the slots that are not worth keeping:
    behind the end of the file, doubles, and blocks whose parent is missing."""
    copies: list[TierCopy] = []
    dropped: list[int] = []
    copy_of: dict[bytes, TierCopy] = {}
    find, add = copy_of.get, copies.append
    # A hundred thousand times: so no call of a Python function more than must be.
    stored, make_record = CopyState.STORED, partial(tuple.__new__, BlockRecord)
    with no_collection():
        for row in sorted(rows, key=itemgetter(3)):
            slot, block_hash, parent_hash, position, _, _, hits, hit_at_s, _ = row
            parent = find(parent_hash) if position else None
            if (
                slot >= num_slots
                or block_hash in copy_of
                or (position and (parent is None or parent.record[2] != position - 1))
            ):
                dropped.append(slot)
                continue
            if parent is not None:
                parent.num_children += 1
            copy = TierCopy(make_record(row[1:6]), parent, slot, stored, 0, 0, 0, hits, hit_at_s)
            copy_of[block_hash] = copy
            add(copy)
    return copies, dropped


def unwrap_rows(
    rows: Sequence[tuple[Any, ...]], cipher: Cipher | None
) -> tuple[Sequence[tuple[Any, ...]], dict[int, bytes], list[int]]:
    """Rows with their ids in the clear, the data key of each slot, and the slots whose row this cipher cannot read."""
    if cipher is None and all(row[-1] is None for row in rows):
        return rows, {}, []
    plain: list[tuple[Any, ...]] = []
    keys: dict[int, bytes] = {}
    unreadable: list[int] = []
    for row in rows:
        slot, block_hash, parent_hash, position, packed_ids, extra, hits, hit_at_s, wrapped = row
        if wrapped is not None and cipher is not None:
            try:
                keys[slot], packed_ids, extra = cipher.unwrap_row(block_hash, wrapped)
            except BadRecordError:
                unreadable.append(slot)
                continue
        elif wrapped is not None or cipher is not None:
            unreadable.append(slot)
            continue
        plain.append((slot, block_hash, parent_hash, position, packed_ids, extra, hits, hit_at_s, None))
    return plain, keys, unreadable


@contextmanager
def no_collection() -> Iterator[None]:
    """A hundred thousand new objects, none of them garbage: each collection would walk over all of them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
