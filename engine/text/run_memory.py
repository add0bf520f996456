"""Remembers how answers were sampled, for clients that send their whole history as text with each request."""

from __future__ import annotations

import hashlib
import secrets
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

_DIGEST_BYTES = 16
MAX_ANSWERS = 32_768
"""However short they are: an answer costs some 300 bytes beside its ids."""


class KeptRuns(Protocol):
    """A place that outlives the process."""

    def find(self, key: bytes) -> Sequence[int] | None: ...

    def put(self, key: bytes, block_hash: bytes, token_ids: Sequence[int]) -> None:
        """Kept as long as the block `block_hash` is."""
        ...


class Chain:
    """A running keyed hash over the ids of a prompt so far."""

    def __init__(self, key: bytes):
        self._hash = hashlib.blake2b(key=key, digest_size=_DIGEST_BYTES)

    def extend(self, token_ids: Iterable[int]) -> None:
        self._hash.update(array("I", token_ids).tobytes())

    def run_key(self, following_ids: Sequence[int], text: str) -> bytes:
        """Name of the answer `text` after the chain and then `following_ids`. White space at its ends is no matter."""
        named = self._hash.copy()
        named.update(array("I", following_ids).tobytes())
        # Fixed length, so that no text can be taken for ids.
        named.update(hashlib.blake2b(text.strip().encode(errors="surrogatepass"), digest_size=32).digest())
        return named.digest()


class RunMemory:
    """Bounded, least recently used out first. Thread-safe.

    With a key of the store and `kept`, what is remembered survives a restart, as long as the blocks of the answer do;
    without, the key makes names useless outside this process.
    """

    def __init__(self, max_tokens: int = 1_000_000, key: bytes | None = None, kept: KeptRuns | None = None):
        """`max_tokens`: sum of the lengths of the remembered answers (4 MB of ids at the default)."""
        self._key = key if key is not None else secrets.token_bytes(32)
        self._kept = kept
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._runs: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def chain(self) -> Chain:
        return Chain(self._key)

    def remember(
        self, prompt_token_ids: Sequence[int], text: str, token_ids: Sequence[int], block_hash: bytes | None = None
    ) -> None:
        """`token_ids`: what `answer_ids` keeps of the answer whose visible text is `text`. `block_hash`: the last full
        block of prompt and answer, if there is one."""
        if not token_ids or not text.strip():
            return
        key = self.chain().run_key(prompt_token_ids, text)
        self._put(key, token_ids)
        if self._kept is not None and block_hash is not None:
            self._kept.put(key, block_hash, token_ids)

    def find(self, key: bytes) -> tuple[int, ...] | None:
        with self._lock:
            ids = self._runs.get(key)
            if ids is not None:
                self._runs.move_to_end(key)
                return tuple(ids)
        kept = self._kept.find(key) if self._kept is not None else None
        if kept is None:
            return None
        self._put(key, kept)
        return tuple(kept)

    def clear(self) -> None:
        """Forget what this process remembers; what is kept elsewhere goes with its blocks."""
        with self._lock:
            self._runs.clear()
            self._num_tokens = 0

    def _put(self, key: bytes, token_ids: Sequence[int]) -> None:
        with self._lock:
            self._num_tokens += len(token_ids) - len(self._runs.pop(key, ()))
            self._runs[key] = array("I", token_ids)
            while self._num_tokens > self._max_tokens or len(self._runs) > MAX_ANSWERS:
                _, oldest = self._runs.popitem(last=False)
                self._num_tokens -= len(oldest)
