"""A scripted engine with the contract of `EngineThread`, and a text side of one token per character.

    python tests/app/service/fake_engine.py     serves CHATKV_HOME with a model called "fake"

The answer to a prompt is scripted by its last user message: `say TEXT`, `count N`, `fail`, `hold` (never ends), or else
the message is echoed. CHATKV_FAKE_TOKENS_PER_S sets the pace (default: as fast as it goes).
"""

from __future__ import annotations

import datetime as dt
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from chatkv.app.errors import UserError
from chatkv.app.hub.installed import InstalledModel
from chatkv.app.paths import Paths
from chatkv.app.service.kv_store import KvStore
from chatkv.app.service.loaded import LoadedModel, ModelPlace
from chatkv.app.service.process import run
from chatkv.app.service.service import Endpoints, Service
from chatkv.app.settings import Settings
from chatkv.engine.errors import (
    EngineClosedError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    TemplateError,
)
from chatkv.engine.metrics import EngineStats
from chatkv.engine.request import (
    FinishReason,
    GenerationRequest,
    LoadDecision,
    Miss,
    Progress,
    RequestOutput,
    RequestStatus,
    TokenLogprob,
)
from chatkv.engine.text.messages import ChatMessage
from chatkv.engine.text.miss import MissReason
from chatkv.engine.text.transcript import Rendered

if __package__:
    from .fake_store import FakeCache, FakeStore, FakeTier, hash_blocks
else:  # Run by its path.
    sys.path.insert(0, str(Path(__file__).parent))
    from fake_store import FakeCache, FakeStore, FakeTier, hash_blocks  # type: ignore[no-redef]

USER, ASSISTANT, SYSTEM, END = 1, 2, 3, 4
"""Control tokens; every other token is the code point of a character, in bytes: ids 256 .. 511."""
BYTE = 256
_ROLES = {"user": USER, "assistant": ASSISTANT, "system": SYSTEM}


class FakeText:
    """One token per UTF-8 byte, so that characters are split over tokens."""

    tokenizer_hash = "fake-tokenizer"
    vocab_size = 512

    def __init__(self) -> None:
        self.remembered: list[str] = []
        self.days: list[dt.date | None] = []
        """The day that each prompt was rendered for."""

    def min_num_tokens(self, text: str) -> int:
        return len(text.encode("utf-8", "surrogatepass"))

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        continue_final: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        today: dt.date | None = None,
    ) -> Rendered:
        self.days.append(today)
        ids: list[int] = []
        for message in messages:
            if message.content == "template refuses":
                raise TemplateError("The template of this model refuses these messages.")
            ids += [_ROLES.get(message.role, USER), *(message.token_ids or encode(message.content)), END]
        if continue_final:
            return Rendered(ids[:-1], "", continued_ids=tuple(messages[-1].token_ids or ()))
        return Rendered([*ids, ASSISTANT], "")

    def remember(
        self,
        prompt_token_ids: Sequence[int],
        text: str,
        sampled_ids: Sequence[int],
        block_hash: bytes | None = None,
    ) -> None:
        self.remembered.append(text)

    def forget_answers(self) -> None:
        self.remembered.clear()

    def explain_miss(self, prompt_token_ids: Sequence[int], miss: Miss) -> MissReason:
        before = self.decode(prompt_token_ids[: miss.position])
        return MissReason(
            miss.position, before, self.decode(miss.prompt_token_ids), self.decode(miss.expected_token_ids)
        )

    def answer_ids(self, sampled_ids: Sequence[int], visible_text: str) -> tuple[int, ...]:
        return tuple(encode(visible_text)[: len(sampled_ids)])

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id - BYTE]) if token_id >= BYTE else b""

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")


def encode(text: str) -> list[int]:
    return [BYTE + byte for byte in text.encode("utf-8", "replace")]


@dataclass
class _Running:
    request: GenerationRequest
    on_output: Callable[[RequestOutput], None]
    script: Iterator[bytes | str]
    num_left_to_read: int
    num_made: int = 0
    made_ids: tuple[int, ...] = ()
    held: bytes = b""
    is_cancelled: bool = False
    has_queued_progress: bool = False


@dataclass
class FakeEngine:
    """Steps all requests in turn on its own thread. `step_gate` cleared: the engine stands still."""

    context_tokens: int = 100_000
    max_num_seqs: int = 8
    max_num_waiting: int = 4
    tokens_per_s: float | None = None
    prefill_chunk: int = 1 << 30
    limits_context: bool = False
    """Answers end where prompt and answer fill the context."""
    fingerprint: bytes = b"fingerprint"
    tiers: Sequence[FakeTier] = ()
    miss: Miss | None = None
    """What every request is told."""
    load: LoadDecision | None = None
    requests: list[GenerationRequest] = field(default_factory=list)
    warm_requests: list[GenerationRequest] = field(default_factory=list)
    warm_gate: threading.Event = field(default_factory=threading.Event)
    """Cleared: warm requests do not end by themselves."""
    step_gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.step_gate.set()
        self.warm_gate.set()
        self.engine = FakeCache(self.tiers)
        self._condition = threading.Condition()
        self._waiting: list[_Running] = []
        self._running: list[_Running] = []
        self._cached: set[tuple[int, ...]] = set()
        self._num_generated = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name="fake-engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest, on_output: Callable[[RequestOutput], None]) -> None:
        num_tokens = len(request.prompt_token_ids)
        if num_tokens >= self.context_tokens:
            raise PromptTooLongError(num_tokens, self.context_tokens)
        if request.n > self.max_num_seqs:
            raise InvalidRequestError(f"n must be between 1 and {self.max_num_seqs}", "n")
        with self._condition:
            if len(self._waiting) >= self.max_num_waiting:
                raise QueueFullError(len(self._waiting))
            if self._is_closed:
                raise EngineClosedError("The engine is stopping.")
            (self.requests if request.warm is None else self.warm_requests).append(request)
            self._waiting.append(_Running(request, on_output, script_for(request), num_tokens))
            self._condition.notify()

    def cancel(self, request_id: str) -> None:
        with self._condition:
            for running in (*self._waiting, *self._running):
                if running.request.request_id == request_id:
                    running.is_cancelled = True
            self._condition.notify()

    def run(self, work: Callable[[FakeCache], Any]) -> Future[Any]:
        with self._condition:
            if self._is_closed:
                raise EngineClosedError("The engine is stopping.")
        done: Future[Any] = Future()
        done.set_result(work(self.engine))
        return done

    def stats(self) -> EngineStats:
        with self._condition:
            num_running, num_waiting = len(self._running), len(self._waiting)
        return EngineStats(
            num_running=num_running,
            num_waiting=num_waiting,
            num_loading=0,
            num_hit_tokens_by_tier={"device": 7 * len(self.requests)},
            batch_size=num_running,
            num_blocks=64,
            num_used=num_running,
            num_cached=0,
            num_free=64 - num_running,
            unused_slot_share=0.0,
            token_budget=512,
            num_steps=0,
            num_prefix_query_tokens=0,
            num_prefix_hit_tokens=0,
            num_computed_prompt_tokens=0,
            num_generated_tokens=self._num_generated,
            num_preemptions=0,
            num_failed_requests=0,
            step_p50_s=0.0,
            step_p99_s=0.0,
            tiers={tier.name: tier.stats() for tier in self.tiers},
        )

    @property
    def num_active(self) -> int:
        with self._condition:
            return len(self._running) + len(self._waiting)

    def close(self) -> None:
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        self.step_gate.set()
        self._thread.join()
        for tier in self.tiers:
            tier.close()

    def _loop(self) -> None:
        while True:
            with self._condition:
                while not (self._waiting or self._running or self._is_closed):
                    self._condition.wait()
                if self._is_closed:
                    for running in (*self._waiting, *self._running):
                        self._end(running, FinishReason.CANCELLED)
                    return
                active = (*self._waiting, *self._running)
            for running in active:
                if running.is_cancelled:
                    self._end(running, FinishReason.CANCELLED)
            if not self.step_gate.is_set():
                self._report_queue()
                with self._condition:
                    self._condition.wait(0.005)
                continue
            with self._condition:
                while self._waiting and len(self._running) < self.max_num_seqs:
                    self._running.append(self._waiting.pop(0))
                steps = tuple(self._running)
            self._report_queue()
            for running in steps:
                if not running.is_cancelled:
                    self._step(running)
            if self.tokens_per_s:
                time.sleep(1 / self.tokens_per_s)

    def _report_queue(self) -> None:
        with self._condition:
            waiting = tuple(self._waiting)
        for position, running in enumerate(waiting, 1):
            if not running.has_queued_progress:
                running.has_queued_progress = True
                self._progress(running, RequestStatus.WAITING, position)

    def _step(self, running: _Running) -> None:
        if running.num_left_to_read:
            running.num_left_to_read = max(0, running.num_left_to_read - self.prefill_chunk)
            self._progress(running, RequestStatus.RUNNING, None)
            return
        request = running.request
        if request.warm is not None:
            if self.warm_gate.is_set():
                self._end(running, FinishReason.STOP)
            return
        limit = request.sampling.max_tokens
        if limit is None and self.limits_context:
            limit = self.context_tokens - len(request.prompt_token_ids)
        item = next(running.script, None)
        if item is None:
            self._end(running, FinishReason.STOP)
        elif isinstance(item, str):
            self._end(running, FinishReason.ERROR, item)
        elif item:
            self._num_generated += request.n
            running.num_made += 1
            running.made_ids += (BYTE + item[0],)
            running.held += item
            try:
                text, running.held = running.held.decode(), b""
            except UnicodeDecodeError:
                text = ""
            is_last = limit is not None and running.num_made >= limit
            for index in range(request.n):
                self._emit(running, index, text, item, FinishReason.LENGTH if is_last else None)
            if is_last:
                self._forget(running)

    def _emit(self, running: _Running, index: int, text: str, item: bytes, finish_reason: FinishReason | None) -> None:
        request = running.request
        token_id = BYTE + item[0]
        num_top = request.sampling.num_logprobs
        logprobs = ()
        if num_top is not None:
            logprobs = (TokenLogprob(token_id, -0.5, ((token_id, -0.5),) * num_top),)
        running.on_output(
            RequestOutput(
                request.request_id,
                index,
                text,
                (token_id,),
                logprobs,
                finish_reason,
                num_prompt_tokens=len(request.prompt_token_ids),
                num_cached_tokens=7,
                cached_by_tier={"device": 7},
                miss=self.miss,
                load=self.load,
                block_hashes=self._hold(running) if finish_reason else (),
            )
        )

    def _hold(self, running: _Running) -> tuple[bytes, ...]:
        request = running.request
        hashes = hash_blocks(self.fingerprint, request.prompt_token_ids + running.made_ids)
        self.engine.hold(request.owner, hashes, request.is_transient)
        return tuple(hashes)

    def _progress(self, running: _Running, status: RequestStatus, position: int | None) -> None:
        num_tokens = len(running.request.prompt_token_ids)
        progress = Progress(status, num_tokens, num_tokens - running.num_left_to_read, position)
        running.on_output(RequestOutput(running.request.request_id, 0, progress=progress))

    def _end(self, running: _Running, reason: FinishReason, error: str | None = None) -> None:
        self._forget(running)
        for index in range(running.request.n):
            running.on_output(
                RequestOutput(
                    running.request.request_id,
                    index,
                    finish_reason=reason,
                    error=error,
                    num_prompt_tokens=len(running.request.prompt_token_ids),
                    num_cached_tokens=7,
                    cached_by_tier={"device": 7},
                    miss=self.miss,
                    load=self.load,
                    block_hashes=self._hold(running) if reason is FinishReason.STOP else (),
                )
            )

    def _forget(self, running: _Running) -> None:
        with self._condition:
            for group in (self._waiting, self._running):
                if running in group:
                    group.remove(running)


def script_for(request: GenerationRequest) -> Iterator[bytes | str]:
    """Bytes of the answer one by one; "" items make no token; a string ends it with that error."""
    ids = list(request.prompt_token_ids)
    start = max(index for index, token_id in enumerate(ids) if token_id in (USER, ASSISTANT))
    said = FakeText().decode(ids[start:]) if ids[start] == ASSISTANT else ""
    asked_at = max((index for index in range(start) if ids[index] == USER), default=0)
    asked = FakeText().decode(ids[asked_at : ids.index(END, asked_at)] if END in ids[asked_at:] else ids[asked_at:])
    word, _, rest = asked.partition(" ")
    if word == "fail":
        yield from (b"o", b"h", "The engine failed on purpose.")
    elif word == "hold":
        yield from (bytes([byte]) for byte in b"holding")
        while True:
            yield b""
    elif word == "count":
        text = " ".join(str(number) for number in range(1, int(rest) + 1))
        yield from (bytes([byte]) for byte in text.removeprefix(said).encode())
    else:
        text = rest if word == "say" else asked
        yield from (bytes([byte]) for byte in text.removeprefix(said).encode())


def fake_installed(name: str = "fake", context_tokens: int = 4096, problem: str = "") -> InstalledModel:
    return InstalledModel(
        name=name,
        path=Path("/nowhere") / name,
        source="test",
        licence="Apache-2.0",
        content_sha256="0" * 64,
        weight_format="int4",
        num_params=1000,
        size_bytes=500,
        context_tokens=context_tokens,
        eos_token_ids=(END,),
        bos_token_id=None,
        created_at="2026-01-02T03:04:05+00:00",
        problem=problem,
    )


class FakeModels:
    """Installed models in memory, and their loader."""

    def __init__(self, *models: InstalledModel, **engine_options: Any):
        self.num_threads = 2
        self.place = ModelPlace()
        self.models = {model.name: model for model in models or (fake_installed(),)}
        self.engine_options = engine_options
        self.engines: list[FakeEngine] = []
        self.load_gate = threading.Event()
        self.load_gate.set()
        self.load_error: Exception | None = None
        self.store = FakeStore()
        self.kv_store: KvStore | None = None

    def list(self) -> list[InstalledModel]:
        return list(self.models.values())

    def get(self, name: str) -> InstalledModel:
        if name not in self.models:
            raise UserError(f"The model '{name}' is not installed.")
        if self.models[name].problem:
            raise UserError(f"The model '{name}' is damaged: {self.models[name].problem}.")
        return self.models[name]

    def remove(self, name: str) -> None:
        del self.models[name]

    def load(self, installed: InstalledModel, on_progress: Callable[[float], None]) -> LoadedModel:
        on_progress(0.5)
        self.load_gate.wait()
        if self.load_error is not None:
            raise self.load_error
        fingerprint = installed.name.encode()
        kv_store = self.kv_store
        tier = kv_store and kv_store.tier_for(fingerprint, 4096, installed.name, installed.content_sha256)
        tiers = [tier] if tier is not None else []
        engine = FakeEngine(
            context_tokens=installed.context_tokens, fingerprint=fingerprint, tiers=tiers, **self.engine_options
        )
        self.engines.append(engine)
        return LoadedModel(
            installed=installed,
            context_tokens=installed.context_tokens,
            num_embd=64,
            place=self.place,
            weight_format=installed.weight_format,
            weights=f"{installed.weight_format}, as in the model's file",
            describe_kernels=lambda: f"native AVX2, {self.num_threads} threads",
            set_num_threads=partial(setattr, self, "num_threads"),
            default_sampling={},
            block_bytes=4096,
            engine=engine,
            text=FakeText(),
            fingerprint=fingerprint,
            hash_blocks=partial(hash_blocks, fingerprint),
            tiers=tiers,
        )

    def load_default(self) -> LoadedModel:
        return self.load(self.list()[0], lambda share: None)

    def make_service(self, paths: Paths, settings: Settings, endpoints: Endpoints, **options: Any) -> Service:
        self.kv_store = KvStore(paths, settings, self.store.open)
        return Service(paths, settings, self, self.load, endpoints, self.kv_store, **options)


def main() -> int:
    pace = os.environ.get("CHATKV_FAKE_TOKENS_PER_S")
    models = FakeModels(tokens_per_s=float(pace) if pace else None, max_num_waiting=64)
    return run(is_detached="--detached" in sys.argv, make_service=models.make_service)


if __name__ == "__main__":
    sys.exit(main())
