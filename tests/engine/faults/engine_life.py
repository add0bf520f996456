"""An engine on the exact integer runner over a real disk store: any wrong byte that comes back is a wrong token or is
noticed by the runner itself."""

from __future__ import annotations

from pathlib import Path
from threading import Event

from disk_driver import KEY, QUOTA_BYTES
from harness import GREEDY_10, Answer, Harness
from integer_runner import new_hasher

from chatkv.engine.request import SamplingParams
from chatkv.engine.store.directory import DiskStore
from chatkv.engine.store.files import Files, OsFiles

IMAGE_BYTES = 4096
MAX_LOAD_S = 30.0
QUEUED_S = 0.1
"""Given to a disk that works to store what a request waits for; then the clock moves on."""
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
Ids = tuple[int, ...]


class Life(Harness):
    """From the start of a service to its end."""

    def __init__(self, directory: Path, files: Files | None = None, *, num_blocks: int = 40) -> None:
        hasher = new_hasher()
        self.store = DiskStore.open(directory, KEY, QUOTA_BYTES, files=files or OsFiles())
        self.disk = self.store.tier_for(hasher.fingerprint.digest, IMAGE_BYTES, "integer", "0" * 64)
        super().__init__(num_blocks, hasher=hasher, tiers=[self.disk], image_bytes=IMAGE_BYTES)
        self._has_news = Event()
        self.disk.on_change = self._has_news.set
        self._num_requests = 0

    def say(self, token_ids: Ids, sampling: SamplingParams = GREEDY_10, owner: str = "chat") -> tuple[Answer, Ids]:
        """One answer, checked against the model that has no cache; and the chat with it. Others may go on meanwhile."""
        self._num_requests += 1
        request_id = f"request {self._num_requests}"
        self.add(request_id, token_ids, sampling, owner=owner)
        answer = self.finish(request_id)
        assert answer.token_ids == self.expected(token_ids, sampling)
        return answer, token_ids + tuple(answer.token_ids)

    def finish(self, request_id: str) -> Answer:
        """Steps until the request has ended; the clock stands still while the disk works."""
        while (answer := self.answers.get((request_id, 0))) is None or answer.reason is None:
            self._has_news.clear()
            self.step()
            if self.engine.is_waiting:
                self._wait()
        return answer

    def _wait(self) -> None:
        is_loading = self.engine.loads.stalls_at_s is not None
        if not self._has_news.wait(MAX_LOAD_S if is_loading else QUEUED_S):
            assert not is_loading, "a load neither ends nor says anything"
            assert self.engine.wait_s is not None, "the engine waits for something that never comes"
            self.now_s += self.engine.wait_s + 0.01

    def settle(self) -> None:
        """What was computed is on disk."""
        while not self.engine.is_waiting or self.disk.stats().num_queued:
            self.step()
            self.disk.flush(30.0)

    def leave_device(self) -> None:
        """As other chats would press everything out of the pool."""
        pool = self.engine.kv.pool
        pool.free(pool.allocate(pool.num_free))
        self.engine.check_integrity()

    def num_disk_tokens(self, answer: Answer) -> int:
        return answer.outputs[-1].cached_by_tier.get("disk", 0)

    def end(self) -> None:
        self.engine.close()
        self.store.close()
