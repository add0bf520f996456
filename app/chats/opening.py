"""Opening, closing and mending the file: the order in which a store comes to life."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import schema, turns
from .database import ChatDatabase
from .records import SalvageReport


@dataclass(frozen=True, slots=True)
class Opened:
    db: ChatDatabase
    report: SalvageReport | None = None
    num_recovered_replies: int = 0


def open_store(path: Path, now: Callable[[], float]) -> Opened:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    db = ChatDatabase.on_disk(path, now)
    schema.upgrade(db.sql, lambda version: schema.back_up(db.sql, path, version))
    return Opened(db, None, turns.recover_incomplete(db))


def close_store(db: ChatDatabase) -> None:
    db.close()


def mend(db: ChatDatabase, error: sqlite3.Error) -> Opened | None:
    return None
