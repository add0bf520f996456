"""The engine with the default model and a disk store in this process: what saving costs the processor, and from which
length on loading beats computing."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch

from chatkv.engine.block_hash import BlockHasher, CacheFingerprint
from chatkv.engine.config import BLOCK_SIZE, EngineConfig
from chatkv.engine.engine import Engine
from chatkv.engine.model_runner import ModelRunner
from chatkv.engine.models.decoder import Decoder
from chatkv.engine.models.native import load_model
from chatkv.engine.request import GenerationRequest, LoadDecision, RequestOutput, SamplingParams
from chatkv.engine.sampler import Sampler
from chatkv.engine.store.directory import DiskStore
from tests.running_service import MODEL

from .report import Report, median

KEY = b"k" * 32
NUM_BLOCKS = 400
QUOTA_BYTES = 4 << 30
NUM_PREFILL_TOKENS = 2000
NUM_DECODE_TOKENS = 200
CROSSOVER_BLOCKS = (1, 2, 3, 4, 6, 8, 16, 32)
NUM_REPEATS = 3


@dataclass
class Cost:
    """Processor seconds of one piece of work."""

    engine_s: float = 0.0
    """All threads but the store's."""
    store_s: float = 0.0
    offer_s: float = 0.0
    """Of `engine_s`: handing blocks to the store."""


class BenchEngine:
    """One engine, stepped here."""

    def __init__(self, decoder: Decoder, store: DiskStore | None) -> None:
        self.news = threading.Event()
        self.offer_s = 0.0
        config = EngineConfig(max_context_tokens=NUM_BLOCKS * BLOCK_SIZE, num_blocks=NUM_BLOCKS)
        fingerprint = CacheFingerprint.from_facts(decoder.fingerprint_facts())
        runner = ModelRunner(decoder, NUM_BLOCKS, Sampler(decoder.config.vocab_size))
        tiers = []
        if store is not None:
            tiers.append(store.tier_for(fingerprint.digest, decoder.layout.block_bytes, MODEL, "0" * 64))
            tiers[0].on_change = self.news.set
        hasher = BlockHasher(KEY, fingerprint)
        self.engine = Engine(config, runner, hasher, None, frozenset(), tiers=tiers, images=runner.images)
        self.disk = tiers[0] if tiers else None
        self._num_requests = 0
        self._time_offers()

    def _time_offers(self) -> None:
        store_some = self.engine.tiers.store_some

        def timed(budget_bytes: int) -> None:
            started = time.thread_time()
            store_some(budget_bytes)
            self.offer_s += time.thread_time() - started

        self.engine.tiers.store_some = timed  # type: ignore[method-assign]

    def always_load(self) -> None:
        decide = self.engine.planner.decide

        def loaded(nodes: Sequence[object]) -> LoadDecision:
            return replace(decide(nodes), is_loaded=True)  # type: ignore[arg-type]

        self.engine.planner.decide = loaded  # type: ignore[method-assign]

    def ask(self, token_ids: Sequence[int], num_tokens: int) -> tuple[float, RequestOutput]:
        """Seconds to the first token; the last output."""
        self._num_requests += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        started = time.perf_counter()
        self.engine.add_request(GenerationRequest(f"r{self._num_requests}", tuple(token_ids), sampling))
        ttft_s = 0.0
        while True:
            self.news.clear()
            for output in self.engine.step():
                if output.token_ids:
                    ttft_s = ttft_s or time.perf_counter() - started
                if output.finish_reason is not None:
                    return ttft_s, output
            if self.engine.is_waiting:
                self.news.wait(1.0)

    def settle(self) -> None:
        """All that was computed is on disk."""
        assert self.disk is not None
        while not self.engine.is_waiting or self.disk.stats().num_queued:
            self.engine.step()
            self.disk.flush(10.0)

    def leave_device(self) -> None:
        pool = self.engine.kv.pool
        pool.free(pool.allocate(pool.num_free))

    def drop_cache(self) -> None:
        """The next load comes from the disk."""
        assert self.disk is not None
        self.disk._slab.drop_cache()

    def close(self) -> None:
        self.engine.close()


def thread_cpu_s(native_id: int) -> float:
    return int(Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()[0]) / 1e9


def store_cpu_s() -> float:
    names = [thread for thread in threading.enumerate() if thread.name.startswith(("chatkv-disk", "chatkv-rebuild"))]
    return sum(thread_cpu_s(thread.native_id) for thread in names if thread.native_id is not None)


@contextmanager
def measured(bench: BenchEngine) -> Iterator[Cost]:
    cost = Cost()
    process_s, store_s, offer_s = time.process_time(), store_cpu_s(), bench.offer_s
    yield cost
    cost.store_s = store_cpu_s() - store_s
    cost.engine_s = time.process_time() - process_s - cost.store_s
    cost.offer_s = bench.offer_s - offer_s


def random_ids(num_tokens: int, seed: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(100, 40_000) for _ in range(num_tokens)]


def measure_saving(bench: BenchEngine, report: Report) -> None:
    bench.ask(random_ids(64, seed=1), 4)
    bench.settle()
    with measured(bench) as prefill:
        bench.ask(random_ids(NUM_PREFILL_TOKENS, seed=2), 1)
        bench.settle()
    with measured(bench) as decode:
        bench.ask(random_ids(32, seed=3), NUM_DECODE_TOKENS)
        bench.settle()
    for name, cost, num_tokens, limit in (
        ("prefill", prefill, NUM_PREFILL_TOKENS, "<= 3 %"),
        ("decode", decode, NUM_DECODE_TOKENS, "<= 2 %"),
    ):
        share = 100 * cost.store_s / cost.engine_s
        report.add(f"store threads' share of the engine's processor time, {name}", share, "%", limit=limit)
        per_token = 1e6 * (cost.store_s + cost.offer_s) / num_tokens
        report.add(f"processor time to save a token, {name}", per_token, "us", against=1e6 * cost.engine_s / num_tokens)


def measure_crossover(decoder: Decoder, store: DiskStore, report: Report) -> None:
    """Prompts of n blocks and one token more, computed and loaded."""
    plain = BenchEngine(decoder, None)
    plain.ask(random_ids(64, seed=4), 4)
    prompts = {
        n: [random_ids(n * BLOCK_SIZE + 1, seed=100 * n + k) for k in range(NUM_REPEATS)] for n in CROSSOVER_BLOCKS
    }
    computed = {n: median([plain.ask(ids, 1)[0] for ids in prompts[n]]) for n in CROSSOVER_BLOCKS}
    bench = BenchEngine(decoder, store)
    bench.always_load()
    for n in CROSSOVER_BLOCKS:
        for ids in prompts[n]:
            bench.ask(ids, 1)
    bench.settle()
    crossover = 0
    for n in CROSSOVER_BLOCKS:
        bench.leave_device()
        bench.drop_cache()
        loaded = []
        for ids in prompts[n]:
            ttft_s, output = bench.ask(ids, 1)
            assert output.cached_by_tier.get("disk") == n * BLOCK_SIZE, output
            loaded.append(ttft_s)
        loaded_s = median(loaded)
        if loaded_s < computed[n]:
            crossover = crossover or n * BLOCK_SIZE
        else:
            crossover = 0
        report.add(f"TTFT of {n * BLOCK_SIZE + 1} tokens, loaded cold", loaded_s, "s", against=computed[n])
    report.add("loading beats computing from this length on", crossover, "tok")
    bench.close()


def measure(home: Path, report: Report) -> None:
    """`home` has the default model; a folder in it is used and removed."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    decoder = load_model(home / "data" / "models" / MODEL)
    folder = home / "bench-kv"
    shutil.rmtree(folder, ignore_errors=True)
    store = DiskStore.open(folder, KEY, QUOTA_BYTES)
    try:
        bench = BenchEngine(decoder, store)
        measure_saving(bench, report)
        bench.close()
        measure_crossover(decoder, store, report)
    finally:
        store.close()
        shutil.rmtree(folder, ignore_errors=True)
