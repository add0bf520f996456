"""`python -m tests.bench.overhead MODEL_DIR`: what a step costs beside the model, in processor time of the engine's
thread. The runner answers at once; scheduler, block pool, detokenizer and sampler are the real ones.

MODEL_DIR: an installed model (its tokenizer is used; logits are random, peaked like those of a small model).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch

from chatkv.engine.batch import Batch, BatchResult, SequenceResult
from chatkv.engine.block_hash import BlockHasher, CacheFingerprint
from chatkv.engine.config import EngineConfig
from chatkv.engine.engine import Engine
from chatkv.engine.request import GenerationRequest, SamplingParams
from chatkv.engine.sampler import Sampler
from chatkv.engine.text.detokenizer import TextStream
from chatkv.engine.text.tokenizer import Tokenizer

from .report import Report, median

VOCAB_SIZE = 49_152
NUM_ROWS = 16
NUM_TOKENS = 300
PROMPT_TOKENS = 1000
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "temperature 0.7, top-p 0.95": {"temperature": 0.7, "top_p": 0.95},
    "0.7, 0.9, repetition 1.1": {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1},
    "top-k 40, min-p 0.05": {"temperature": 0.8, "top_k": 40, "min_p": 0.05},
    "min-p 0.05": {"min_p": 0.05},
}


class InstantRunner:
    """With a sampler it draws from random rows, else it makes ids up."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self._sampler = sampler
        generator = torch.Generator().manual_seed(1)
        shape = (NUM_ROWS, VOCAB_SIZE)
        is_likely = torch.rand(shape, generator=generator) > 0.9997
        peaks = is_likely * (12.0 + 4.0 * torch.randn(shape, generator=generator))
        self._rows = 2.4 * torch.randn(shape, generator=generator) + peaks
        self._random = Random(1)
        self.execute_s = 0.0

    def execute(self, batch: Batch) -> BatchResult:
        started = time.thread_time()
        specs = [spec for sequence in batch.sequences for spec in sequence.samples]
        if self._sampler is not None and specs:
            row = self._random.randrange(NUM_ROWS - len(specs))
            drawn = iter(self._sampler.sample(self._rows[row : row + len(specs)], specs, frozenset()))
            results = [SequenceResult([next(drawn)[0] for _ in s.samples]) for s in batch.sequences]
        else:
            results = [
                SequenceResult([self._random.randrange(300, 40_000) for _ in s.samples]) for s in batch.sequences
            ]
        self.execute_s += time.thread_time() - started
        return BatchResult(results)


def new_engine(tokenizer: Tokenizer, runner: InstantRunner) -> Engine:
    def new_stream(tail: object, stop: tuple[str, ...], resume_text: str) -> TextStream:
        return TextStream(tokenizer, (), stop, resume_text)

    config = EngineConfig(max_context_tokens=8192, num_blocks=4096)
    hasher = BlockHasher(b"k" * 32, CacheFingerprint.from_facts({"model": "bench"}))
    return Engine(config, runner, hasher, new_stream, frozenset({2}))


def add(engine: Engine, name: str, num_prompt: int, seed: int, **sampling: float) -> None:
    random = Random(seed)
    ids = tuple(random.randrange(100, 40_000) for _ in range(num_prompt))
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed, **sampling)  # type: ignore[arg-type]
    engine.add_request(GenerationRequest(name, ids, params))


def decode_us(tokenizer: Tokenizer, num_chats: int, prompt_tokens: int) -> float:
    """Median processor time of a decode step without the runner."""
    runner = InstantRunner()
    engine = new_engine(tokenizer, runner)
    for chat in range(num_chats):
        add(engine, f"c{chat}", prompt_tokens + 3 * chat, seed=chat)
    while engine.counters.num_generated_tokens < 2 * num_chats:
        engine.step()
    times = []
    while engine.has_unfinished:
        started, runner.execute_s = time.thread_time(), 0.0
        engine.step()
        engine.step_stats()
        times.append(time.thread_time() - started - runner.execute_s)
    return 1e6 * median(times)


def sampler_us(num_rows: int, prompt_tokens: int, sampling: dict[str, float], tokenizer: Tokenizer) -> float:
    """Median processor time of drawing the tokens of a step."""
    runner = InstantRunner(Sampler(VOCAB_SIZE))
    engine = new_engine(tokenizer, runner)
    for row in range(num_rows):
        add(engine, f"c{row}", prompt_tokens, seed=row, **sampling)
    while engine.counters.num_generated_tokens < num_rows:
        engine.step()
    times = []
    while engine.has_unfinished:
        runner.execute_s = 0.0
        engine.step()
        times.append(runner.execute_s)
    return 1e6 * median(times)


def waiting_us(tokenizer: Tokenizer, num_waiting: int) -> float:
    """Median processor time of a step while many requests wait for a long prompt that another one reads."""
    runner = InstantRunner()
    engine = new_engine(tokenizer, runner)
    for number in range(1 + num_waiting):
        add(engine, f"w{number}", 7000, seed=1)
    while engine.scheduler.running[0].num_computed_tokens < 4000 if engine.scheduler.running else True:
        engine.step()
    times = []
    while engine.counters.num_generated_tokens == 0:
        assert len(engine.scheduler.waiting) == num_waiting
        started, runner.execute_s = time.thread_time(), 0.0
        engine.step()
        times.append(time.thread_time() - started - runner.execute_s)
    return 1e6 * median(times)


def best(measure: Callable[..., float], *args: object) -> float:
    """A busy machine makes caches cold: the better of three runs."""
    return min(measure(*args) for _ in range(3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path)
    tokenizer = Tokenizer.from_dir(parser.parse_args().model_dir)
    torch.set_num_threads(1)
    report = Report()
    for num_chats, limit in ((1, "<= 300"), (8, "<= 1000")):
        for prompt_tokens in (PROMPT_TOKENS, 6000) if num_chats == 1 else (PROMPT_TOKENS,):
            value = best(decode_us, tokenizer, num_chats, prompt_tokens)
            report.add(f"decode step, {num_chats} chats of {prompt_tokens} tokens", value, "us", limit=limit)
    for name, sampling in SAMPLINGS.items():
        for num_rows in (1, 8):
            value = best(sampler_us, num_rows, PROMPT_TOKENS, sampling, tokenizer)
            report.add(f"sampler, {num_rows} rows, {name}", value, "us")
    report.add("step with 40 waiting for one prompt", best(waiting_us, tokenizer, 40), "us")
    report.print_table()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
