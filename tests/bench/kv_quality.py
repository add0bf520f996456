"""`python -m tests.bench.kv_quality`: what int8 KV costs in quality and gives in room, against fp32 KV in the same run.

The text is English prose that comes with Python, read in one piece; both models see the same tokens, and each keeps
its own KV, so that errors add up as they do in a long chat.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from chatkv.engine.batch import Batch
from chatkv.engine.config import BLOCK_SIZE
from chatkv.engine.model_runner import ModelRunner
from chatkv.engine.models.decoder import Decoder
from chatkv.engine.models.native import load_model
from chatkv.engine.sampler import Sampler
from chatkv.engine.text.tokenizer import Tokenizer
from tests.kv_compare import CHUNK_TOKENS, compare, mix_scales_of_positions, swap_scales_of_heads, text_part
from tests.running_service import MODEL, ROOT, RunningService

from .report import Report, median

NUM_CONTROL_TOKENS = 512
NUM_DECODED = 20
TOPICS = ("objects", "naming", "execmodel", "import", "exceptions", "types", "compound", "specialnames")


def english(tokenizer: Tokenizer, num_tokens: int) -> list[int]:
    from pydoc_data.topics import topics

    ids = tokenizer.encode_run("\n\n".join(topics[topic] for topic in TOPICS))
    if len(ids) < num_tokens:
        raise SystemExit(f"The text has {len(ids)} tokens; choose --tokens of at most that.")
    return ids[:num_tokens]


def new_runner(model: Decoder, num_tokens: int) -> ModelRunner:
    num_blocks = -(-(num_tokens + NUM_DECODED) // BLOCK_SIZE)
    runner = ModelRunner(model, num_blocks, Sampler(model.config.vocab_size))
    runner.pool.zero_()
    return runner


def measure_speed(runners: dict[str, ModelRunner], ids: Sequence[int], report: Report) -> None:
    """Prefill of the whole text, then decode behind it; the two models take turns."""
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
    fp32_prefill = len(ids) / read_s["fp32"]
    fp32_decode = 1 / median(step_s["fp32"])
    report.add(f"prefill, {len(ids)} tokens, fp32 KV", fp32_prefill, "tok/s")
    report.add(f"prefill, {len(ids)} tokens, int8 KV", len(ids) / read_s["int8"], "tok/s", against=fp32_prefill)
    report.add(f"decode behind {len(ids)} tokens, fp32 KV", fp32_decode, "tok/s")
    report.add(f"decode behind {len(ids)} tokens, int8 KV", 1 / median(step_s["int8"]), "tok/s", against=fp32_decode)


def run(home: Path, num_tokens: int) -> None:
    RunningService(home).install_model()
    folder = home / "data" / "models" / MODEL
    ids = english(Tokenizer.from_dir(folder), num_tokens)
    runners = {name: new_runner(load_model(folder, kv_dtype=name), num_tokens) for name in ("fp32", "int8")}
    report = Report()
    plain_bytes, int8_bytes = (1000 / BLOCK_SIZE * r.model.layout.block_bytes / 2**20 for r in runners.values())
    report.add("fp32 KV, 1,000 tokens", plain_bytes, "MiB")
    report.add("int8 KV, 1,000 tokens", int8_bytes, "MiB", against=plain_bytes, limit="ratio <= 0.28")

    quality = compare(runners["fp32"], runners["int8"], ids)
    plain, int8 = quality.perplexities
    report.add(f"perplexity, {num_tokens} tokens, fp32 KV", plain, "")
    report.add(f"perplexity, {num_tokens} tokens, int8 KV", int8, "", against=plain, limit="ratio <= 1.01")
    report.add("KL divergence, mean", float(quality.divergence.mean()), "nat", limit="<= 0.005")
    report.add("KL divergence, 99th percentile", float(quality.divergence.quantile(0.99)), "nat")
    report.add("same most likely token", 100 * quality.agreement, "%", limit=">= 97 %")

    for name, control in (("heads", swap_scales_of_heads), ("positions", mix_scales_of_positions)):
        broken = compare(runners["fp32"], runners["int8"], ids[:NUM_CONTROL_TOKENS], control)
        report.add(f"control, scales of {name} mixed up: KL divergence, mean", float(broken.divergence.mean()), "nat")
    measure_speed(runners, ids, report)
    report.print_table()


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
