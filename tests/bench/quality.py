"""`python -m tests.bench.quality`: what the native kernels' rounding costs, and what int8 KV costs beside it, against
fp32 arithmetic on the same weights in the same run.

The text is English prose that comes with Python. Read in one piece, each model keeps its own KV, so that errors add up
as they do in a long chat; read in short windows, the next token is judged at every position.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from chatkv.engine.batch import Batch
from chatkv.engine.config import BLOCK_SIZE
from chatkv.engine.model_runner import ModelRunner
from chatkv.engine.models.native import load_model
from chatkv.engine.sampler import Sampler
from chatkv.engine.text.tokenizer import Tokenizer
from chatkv.kernels import KernelChoice
from tests.kv_compare import CHUNK_TOKENS, compare, mix_scales_of_positions, swap_scales_of_heads, text_part
from tests.running_service import MODEL, ROOT, RunningService

from .report import Report, median

NUM_CONTROL_TOKENS = 512
NUM_DECODED = 20
NUM_WINDOWS = 200
WINDOW_TOKENS = 64
STATED_ROUNDING = 0.5
"""Logits: two tokens that fp32 arithmetic holds apart by less may change places."""
TOPICS = ("objects", "naming", "execmodel", "import", "exceptions", "types", "compound", "specialnames")
TORCH, NATIVE, INT8 = "fp32 arithmetic, fp32 KV", "native kernels, fp16 KV", "native kernels, int8 KV"


def english(tokenizer: Tokenizer, num_tokens: int) -> list[int]:
    from pydoc_data.topics import topics

    ids = tokenizer.encode_run("\n\n".join(topics[topic] for topic in TOPICS))
    if len(ids) < num_tokens:
        raise SystemExit(f"The text has {len(ids)} tokens; choose --tokens of at most that.")
    return ids[:num_tokens]


def new_runners(folder: Path, num_tokens: int) -> dict[str, ModelRunner]:
    models = {
        TORCH: load_model(folder, KernelChoice(cpu_kernels="torch"), kv_dtype="fp32"),
        NATIVE: load_model(folder, kv_dtype="fp16"),
        INT8: load_model(folder, kv_dtype="int8"),
    }
    num_blocks = -(-(num_tokens + NUM_DECODED) // BLOCK_SIZE)
    runners = {}
    for name, model in models.items():
        runners[name] = ModelRunner(model, num_blocks, Sampler(model.config.vocab_size))
        runners[name].pool.zero_()
    return runners


def measure_text(runners: dict[str, ModelRunner], ids: Sequence[int], report: Report) -> None:
    """One long text."""
    for found, against, limit in ((NATIVE, TORCH, 1.003), (INT8, NATIVE, 1.01)):
        quality = compare(runners[against], runners[found], ids)
        before, after = quality.perplexities
        report.add(f"perplexity, {len(ids)} tokens, {against}", before, "")
        report.add(f"the same, {found}", after, "", against=before, limit=f"ratio <= {limit}")
        report.add("KL divergence, mean", float(quality.divergence.mean()), "nat", limit="<= 0.005")
        report.add("KL divergence, 99th percentile", float(quality.divergence.quantile(0.99)), "nat")
        report.add("same most likely token", 100 * quality.agreement, "%", limit=">= 97 %")
    for name, control in (("heads", swap_scales_of_heads), ("positions", mix_scales_of_positions)):
        broken = compare(runners[NATIVE], runners[INT8], ids[:NUM_CONTROL_TOKENS], control)
        report.add(f"control, scales of {name} mixed up: KL divergence, mean", float(broken.divergence.mean()), "nat")


def measure_windows(runners: dict[str, ModelRunner], ids: Sequence[int], report: Report) -> None:
    """Many short texts: how often, and where, another token is the most likely one."""
    starts = Random(3).sample(range(len(ids) - WINDOW_TOKENS), NUM_WINDOWS)
    differs, leads, errors = [], [], []
    for start in starts:
        batch = Batch([text_part(ids[start : start + WINDOW_TOKENS], 0)])
        expected, found = (runners[name].all_logits(batch) for name in (TORCH, NATIVE))
        differs.append(expected.argmax(-1) != found.argmax(-1))
        leads.append(_lead(expected))
        errors.append((found - expected).abs().amax(-1))
    is_other, lead, error = torch.cat(differs), torch.cat(leads), torch.cat(errors)
    name = f"{NUM_WINDOWS} x {WINDOW_TOKENS} tokens"
    report.add(f"same most likely token, {name}", 100 * float((~is_other).float().mean()), "%", limit=">= 98 %")
    widest = float(lead[is_other].max()) if bool(is_other.any()) else 0.0
    report.add("widest lead of the first over the second where they differ", widest, "", limit=f"<= {STATED_ROUNDING}")
    report.add("largest error of a position's logits, median", float(error.median()), "")
    report.add("largest error of a position's logits, 99th percentile", float(error.quantile(0.99)), "")


def measure_speed(runners: dict[str, ModelRunner], ids: Sequence[int], report: Report) -> None:
    """Prefill of the whole text, then decode behind it; the models take turns."""
    read_s: dict[str, float] = dict.fromkeys(runners, 0.0)
    for start in range(0, len(ids), CHUNK_TOKENS):
        batch = Batch([text_part(ids[start : start + CHUNK_TOKENS], start)])
        for name, runner in runners.items():
            read_s[name] += _seconds(runner, batch)
    step_s: dict[str, list[float]] = {name: [] for name in runners}
    for position in range(len(ids), len(ids) + NUM_DECODED):
        batch = Batch([text_part(ids[:1], position, is_sampled=True)])
        for name, runner in runners.items():
            step_s[name].append(_seconds(runner, batch))
    for name in runners:
        prefill, decode = len(ids) / read_s[name], 1 / median(step_s[name])
        report.add(f"prefill, {len(ids)} tokens, {name}", prefill, "tok/s", against=len(ids) / read_s[TORCH])
        report.add(f"decode behind them, {name}", decode, "tok/s", against=1 / median(step_s[TORCH]))


def run(home: Path, num_tokens: int) -> None:
    RunningService(home).install_model()
    folder = home / "data" / "models" / MODEL
    ids = english(Tokenizer.from_dir(folder), num_tokens)
    runners = new_runners(folder, num_tokens)
    report = Report()
    for name, runner in runners.items():
        report.add(f"1,000 tokens of {name}", 1000 / BLOCK_SIZE * runner.model.layout.block_bytes / 2**20, "MiB")
    measure_windows(runners, ids, report)
    measure_text(runners, ids, report)
    measure_speed(runners, ids, report)
    report.print_table()


def _lead(logits: Tensor) -> Tensor:
    first, second = logits.topk(2).values.unbind(-1)
    return first - second


def _seconds(runner: ModelRunner, batch: Batch) -> float:
    started = time.perf_counter()
    runner.execute(batch)
    return time.perf_counter() - started


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, default=ROOT / "build" / "bench-home", help="kept between runs")
    parser.add_argument("--tokens", type=int, default=4000)
    options = parser.parse_args()
    run(options.home, options.tokens)
