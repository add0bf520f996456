"""Where the blocks of a chain lie now, and what bringing them to the device would take."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from .block_tree import BlockNode
from .config import BLOCK_SIZE
from .tiers.load_planner import LoadPlanner

MISSING = "missing"


class Placement(NamedTuple):
    num_by_run: list[tuple[str, int]]
    """("device", "host", "disk" or "missing"; number of blocks), first blocks first."""
    load_s: float | None
    """To load what lower tiers hold and to compute what is missing. None: not measured yet."""
    compute_s: float | None
    """To compute all of it. None: not measured yet."""


def place(nodes: Sequence[BlockNode], num_blocks: int, planner: LoadPlanner) -> Placement:
    """`nodes`: the leading blocks of a chain of `num_blocks` that any tier holds. From any thread: what moves in the
    meantime may be counted where it was."""
    places = [node.place for node in nodes]
    num_found = places.index(None) if None in places else len(places)
    num_by_run = [(name or MISSING, len(list(run))) for name, run in groupby(places[:num_found])]
    if num_found < num_blocks:
        num_by_run.append((MISSING, num_blocks - num_found))
    load_s = planner.load_s(nodes[:num_found])
    if num_found < num_blocks:
        computed_s = planner.compute_s(num_found * BLOCK_SIZE, num_blocks * BLOCK_SIZE)
        load_s = None if load_s is None or computed_s is None else load_s + computed_s
    return Placement(num_by_run, load_s, planner.compute_s(0, num_blocks * BLOCK_SIZE))
