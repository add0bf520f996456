"""The disk store of this service's life: opened once, beside everything else, or the reason why there is none."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from chatkv.app.errors import UserError
from chatkv.app.paths import Paths
from chatkv.app.settings import Settings
from chatkv.engine.tiers.tier import LowerTier

from .keys import read_or_make_kv_key, read_or_make_store_key
from .ownership import ServiceLock
from .reuse import COMPUTED, HitCounts
from .store_port import STORE_ERRORS, Hooks, OpenStore, Store

log = logging.getLogger(__name__)
T = TypeVar("T")
DEFAULT_SHARE = 0.25
DEFAULT_LIMIT_BYTES = 50 << 30
LOCK_NAME = "store.lock"
_OWNERS_ID = "owners_id"
_ONLY_WHILE_RUNNING = "Chats are saved, but resume quickly only while the service runs"
"""Of the texts of chats nothing is lost without a store."""


class KvState(StrEnum):
    OPENING = "opening"
    ON = "on"
    OFF = "off"
    """By the setting."""
    MEMORY_ONLY = "memory_only"
    """It should be on; the notice says why it is not."""


class KvStore:
    """Opens in a thread of its own: neither the socket nor the weights wait for it."""

    def __init__(self, paths: Paths, settings: Settings, open_store: OpenStore | None = None):
        self._paths = paths
        self._settings = settings
        self._open_store = open_store or open_disk_store
        self._store: Store | None = None
        self._tier_notice: str | None = None
        self.attaching: bytes | None = None
        """Fingerprint whose tier is open while its engine is still being made."""
        self._thread: threading.Thread | None = None
        self._counts = HitCounts()
        self._status: Any = None
        self._constants: dict[str, Any] = {}
        self.state = KvState.OPENING
        self._reason: str | None = None

    @property
    def store(self) -> Store | None:
        """None: not open yet, off, or memory-only."""
        return self._store

    @property
    def notice(self) -> str | None:
        """What a person should know of it."""
        if self._reason is not None:
            return self._reason
        return self._tier_notice or (self._status.notice if self._status is not None else None)

    @property
    def is_encrypted(self) -> bool:
        return self._store is not None and self._settings.kv_encryption

    @property
    def status(self) -> Any:
        """The store's `StoreStatus` as of the last `refresh`; None without a store."""
        return self._status

    def refresh(self) -> None:
        """Ask the store how it is. Long: it may be in the middle of a commit."""
        store = self._store
        self._status = _quietly(store.status) if store is not None else None

    def start(self, hooks: Hooks) -> None:
        self._thread = threading.Thread(target=self._open, args=(hooks,), name="kv-open", daemon=True)
        self._thread.start()

    def wait(self) -> Store | None:
        """The store once it is open; None when there is none. Long: not on the event loop."""
        if self._thread is not None:
            self._thread.join()
        return self._store

    def tier_for(self, fingerprint: bytes, image_bytes: int, model: str, content_sha256: str) -> LowerTier | None:
        """The disk tier of one model; None when the disk keeps nothing. Long."""
        store = self.wait()
        if store is None:
            return None
        self.attaching = fingerprint
        try:
            tier = store.tier_for(fingerprint, image_bytes, model, content_sha256)
        except STORE_ERRORS as error:
            log.warning("no disk tier for %s: %s", model, error)
            self._tier_notice = f"{_ONLY_WHILE_RUNNING} ({model}): {error}"
            return None
        self._tier_notice = None
        return tier

    def is_out_of_reach(self) -> bool:
        """Whether blocks of earlier lives may lie in the directory, where nobody can remove them now. Long."""
        return self.wait() is None and self.state is KvState.MEMORY_ONLY and any(self._paths.kv_dir.glob("*.slab"))

    def constant(self, name: str) -> Any:
        """Something that was measured before; None: nothing. Long."""
        store = self.wait()
        return self._constants.get(name) if store is None else _quietly(lambda: store.constant(name))

    def set_constant(self, name: str, value: Any) -> None:
        """Keep it, as long as there is a place. Long."""
        self._constants[name] = value
        if (store := self._store) is not None:
            _quietly(lambda: store.set_constant(name, value))

    def count(self, tier: str, num_tokens: int) -> None:
        """Prompt tokens of a request that this tier held, or "computed". Long."""
        if (store := self._store) is None:
            self._counts.add(tier, num_tokens)
        elif tier == COMPUTED:
            _quietly(lambda: store.count_computed(num_tokens))
        else:
            _quietly(lambda: store.count_hits(tier, num_tokens))

    def tokens_24h(self) -> Mapping[str, int]:
        """By tier, "computed" among them. Long."""
        store = self._store
        return self._counts.sums() if store is None else _quietly(store.tokens_24h) or {}

    def close(self) -> None:
        """Long."""
        store = self.wait()
        self._store = self._status = None
        if store is not None:
            _quietly(store.close)

    def _open(self, hooks: Hooks) -> None:
        directory = Path(os.path.realpath(self._paths.kv_dir))  # It may be a link to another disk.
        try:
            if self._settings.kv_disk_bytes == 0:
                purge(directory)
                self.state = KvState.OFF
                return
            key = read_or_make_store_key(self._paths.store_key_file)
            quota_bytes = self._settings.kv_disk_bytes or fixed_quota(self._paths.kv_quota_file, directory)
            master_key = read_or_make_kv_key(self._paths.kv_key_file) if self._settings.kv_encryption else None
            store = self._open_store(directory, key, quota_bytes, master_key, hooks)
            _clear_if_unowned(store, hooks.owners_id())
        except Exception as error:
            if not isinstance(error, (*STORE_ERRORS, UserError)):
                log.exception("the disk store could not be opened")
            log.warning("memory-only: %s", error)
            self.state = KvState.MEMORY_ONLY
            self._reason = f"{_ONLY_WHILE_RUNNING}: {error}"
        else:
            self._store = store
            self.refresh()
            self.state = KvState.ON


class Runs:
    """`KeptRuns` of one model's fingerprint in the store, as long as there is one."""

    def __init__(self, kv_store: KvStore, fingerprint: bytes):
        self._kv_store = kv_store
        self._fingerprint = fingerprint

    def find(self, key: bytes) -> Sequence[int] | None:
        store = self._kv_store.store
        return None if store is None else _quietly(lambda: store.find_run(key))

    def put(self, key: bytes, block_hash: bytes, token_ids: Sequence[int]) -> None:
        store = self._kv_store.store
        if store is not None:
            _quietly(lambda: store.put_run(self._fingerprint, key, block_hash, token_ids))


def _quietly(work: Callable[[], T]) -> T | None:
    """Losing what was kept costs a computation: no reason to fail a request."""
    try:
        return work()
    except STORE_ERRORS as error:
        log.warning("the disk store failed: %s", error)
        return None


def open_disk_store(directory: Path, key: bytes, quota_bytes: int, master_key: bytes | None, hooks: Hooks) -> Store:
    from chatkv.engine.store.directory import DiskStore

    return DiskStore.open(
        directory, key, quota_bytes, master_key=master_key, on_owned=hooks.on_owned, pinned_in=hooks.pinned_in
    )


def fixed_quota(file: Path, directory: Path) -> int:
    """min(25 % of free + own bytes, 50 GiB) as of the first start: it must not shrink as the disk fills up."""
    with contextlib.suppress(OSError, ValueError):
        if (kept := int(file.read_text("ascii"))) > 0:
            return kept
    own_bytes = sum(entry.stat().st_blocks * 512 for entry in directory.rglob("*")) if directory.exists() else 0
    place = next(folder for folder in (directory, *directory.parents) if folder.exists())
    quota_bytes = min(int((shutil.disk_usage(place).free + own_bytes) * DEFAULT_SHARE), DEFAULT_LIMIT_BYTES)
    with contextlib.suppress(OSError):
        file.write_text(f"{quota_bytes}\n", "ascii")
    return quota_bytes


def purge(directory: Path) -> None:
    """Remove a store whole.

    Raises:
        UserError: another service uses it; it stays.
        OSError: a file cannot be removed.
    """
    if not directory.exists():
        return
    lock = ServiceLock(directory / LOCK_NAME)
    if not lock.try_acquire():
        raise UserError(f"{directory} is used by another service, so what it holds was not removed.")
    try:
        shutil.rmtree(directory)
    finally:
        lock.release()


def _clear_if_unowned(store: Store, owners_id: str) -> None:
    """Blocks whose owner rows are lost can be forgotten only as a whole."""
    known = store.constant(_OWNERS_ID)
    if known is not None and known != owners_id:
        log.warning("the disk store starts empty: nobody knows any more whose its blocks are")
        store.clear()
    if known != owners_id:
        store.set_constant(_OWNERS_ID, owners_id)
