"""`python -m tests.compile_gate`: compiles what the engine launches, for each card, and says what it takes.

`--json FILE` keeps the figures; `--table FILE` writes the table of the documentation. Exit status 1 when a kernel does
not compile, spills, or needs more shared memory than the card has.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .cards import CARDS, Card
from .compile_only import compile_only
from .launches import LANES, launches
from .report import Row, refusals, row_of
from .table import write_table


def rows_of(card: Card, lane: str, with_counts: bool) -> list[Row]:
    rows: list[Row] = []
    with compile_only(card) as seen:
        for case in launches(card, lane):
            rows += [row_of(case, compiled, with_counts) for compiled in seen.compiled]
            seen.compiled.clear()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.compile_gate", description=__doc__)
    parser.add_argument("--card", choices=CARDS, action="append", help="default: all; may be given several times")
    parser.add_argument("--lane", choices=LANES, default="all")
    parser.add_argument("--counts", action="store_true", help="count the instructions of hot loops too")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--table", type=Path, metavar="FILE")
    options = parser.parse_args()
    found: dict[str, list[Row]] = {}
    is_refused = False
    for name in options.card or CARDS:
        found[name] = rows_of(CARDS[name], options.lane, options.counts or options.table is not None)
        print(f"{name}: {len(found[name])} kernels", flush=True)
        for refusal in refusals(CARDS[name], found[name]):
            is_refused |= not CARDS[name].is_amd
            print(f"  {refusal.kernel}: {refusal.reason}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.table:
        write_table(options.table, found)
    sys.exit(is_refused)


if __name__ == "__main__":
    main()
