"""Remembers how answers were sampled, for clients that send their whole history as text with each request."""

from __future__ import annotations

import hashlib
import secrets
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

_DIGEST_BYTES = 16
MAX_ANSWERS = 32_768
"""However short they are: an answer costs some 300 bytes beside its ids."""


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
    """Bounded, least recently used out first. Thread-safe. The key makes names useless outside this process."""

    def __init__(self, max_tokens: int = 1_000_000, key: bytes | None = None):
        """`max_tokens`: sum of the lengths of the remembered answers (4 MB of ids at the default)."""
        self._key = key if key is not None else secrets.token_bytes(32)
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._runs: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def chain(self) -> Chain:
        return Chain(self._key)

    def remember(self, prompt_token_ids: Sequence[int], text: str, token_ids: Sequence[int]) -> None:
        """`token_ids`: what `answer_ids` keeps of the answer whose visible text is `text`."""
        if not token_ids or not text.strip():
            return
        key = self.chain().run_key(prompt_token_ids, text)
        with self._lock:
            self._num_tokens += len(token_ids) - len(self._runs.pop(key, ()))
            self._runs[key] = array("I", token_ids)
            while self._num_tokens > self._max_tokens or len(self._runs) > MAX_ANSWERS:
                _, oldest = self._runs.popitem(last=False)
                self._num_tokens -= len(oldest)

    def find(self, key: bytes) -> tuple[int, ...] | None:
        with self._lock:
            ids = self._runs.get(key)
            if ids is None:
                return None
            self._runs.move_to_end(key)
            return tuple(ids)

    def clear(self) -> None:
        with self._lock:
            self._runs.clear()
            self._num_tokens = 0
