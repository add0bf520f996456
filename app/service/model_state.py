"""How it stands with the loaded model, and who waits for which."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum

from .loaded import LoadedModel


class ModelState(StrEnum):
    NO_MODEL = "no_model"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    UNLOADED = "unloaded"
    """Out of memory because nobody asked for long; the next request loads it again."""


@dataclass(slots=True)
class Waiter:
    name: str
    future: asyncio.Future[LoadedModel]
