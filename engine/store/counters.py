"""Sums over time: bytes written per day, tokens per hour. Kept in memory until something else is committed."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Callable

from .index_db import IndexDatabase

_HOUR_S = 3600
_DAY_S = 24 * _HOUR_S
_NUM_HOURS_KEPT = 25
_NUM_DAYS_KEPT = 8
WRITTEN_BYTES = "written_bytes"
"""By local day; everything else by hour."""
COMPUTED = "computed"
"""Beside the names of the tiers: prompt tokens that none of them had."""


class Counters:
    """Thread-safe. A clock that was set back makes later periods invisible, and they are dropped."""

    def __init__(self, database: IndexDatabase, clock: Callable[[], float]):
        self._database = database
        self._clock = clock
        self._lock = threading.Lock()
        self._unsaved: defaultdict[tuple[str, int], int] = defaultdict(int)

    def add(self, name: str, amount: int) -> None:
        with self._lock:
            self._unsaved[name, self._period(name)] += amount

    def written_today_bytes(self) -> int:
        period = self._period(WRITTEN_BYTES)
        saved = self._database.value(
            "select amount from counters where name = ? and period = ?", [WRITTEN_BYTES, period]
        )
        with self._lock:
            return (saved or 0) + self._unsaved[WRITTEN_BYTES, period]

    def tokens_24h(self) -> dict[str, int]:
        """By name: the sums of this hour and the 23 before it."""
        last = self._hour()
        saved = self._database.rows(
            "select name, sum(amount) from counters where name != ? and period between ? and ? group by name",
            [WRITTEN_BYTES, last - 23, last],
        )
        sums = defaultdict(int, saved)
        with self._lock:
            for (name, period), amount in self._unsaved.items():
                if name != WRITTEN_BYTES and last - 23 <= period <= last:
                    sums[name] += amount
        return dict(sums)

    def save_in(self, sql: sqlite3.Connection) -> None:
        """As part of an open transaction. A rollback loses what was added since the last one: it is only a count."""
        with self._lock:
            rows = [(name, period, amount) for (name, period), amount in self._unsaved.items()]
            self._unsaved.clear()
        if not rows:
            return
        sql.executemany(
            "insert into counters values (?, ?, ?)"
            " on conflict (name, period) do update set amount = amount + excluded.amount",
            rows,
        )
        day, hour = self._period(WRITTEN_BYTES), self._hour()
        sql.execute(
            "delete from counters where name = ? and period not between ? and ?",
            [WRITTEN_BYTES, day - _NUM_DAYS_KEPT, day],
        )
        sql.execute(
            "delete from counters where name != ? and period not between ? and ?",
            [WRITTEN_BYTES, hour - _NUM_HOURS_KEPT, hour],
        )

    def _period(self, name: str) -> int:
        if name != WRITTEN_BYTES:
            return self._hour()
        now = self._clock()
        return int((now + time.localtime(now).tm_gmtoff) // _DAY_S)

    def _hour(self) -> int:
        return int(self._clock() // _HOUR_S)
