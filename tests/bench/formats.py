"""`python -m tests.bench.formats [FILE.svg]`: what each weight format costs in quality, beside the default model's own
numbers.

That model comes in Q4_1 and Q8_0. What these stand for, as float32, is taken for the true weights here: every format is
made from them as it would be made from a model's floats, and all arithmetic is float32, so that nothing but the format
differs. Numbers that lay on a grid of 4 bits fit that grid again, so int4 with a minimum in groups of 32 gives back the
very numbers here; "across" cuts its groups in the middle of the file's, which is how it would treat a model that was
never quantised. The text is English prose that comes with Python.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from chatkv.engine.batch import Batch, SampleSpec, ScheduledSequence
from chatkv.engine.config import BLOCK_SIZE
from chatkv.engine.model_runner import ModelRunner
from chatkv.engine.models.decoder import Decoder, WeightFacts
from chatkv.engine.models.native import load_model, write_weights
from chatkv.engine.models.quantised import converted, spec_of_tensor
from chatkv.engine.quant.formats import PackedTensor
from chatkv.engine.quant.spec import QuantSpec, WeightFormat
from chatkv.engine.request import SamplingParams
from chatkv.engine.sampler import Sampler
from chatkv.engine.text.tokenizer import Tokenizer
from chatkv.kernels import KernelChoice
from chatkv.kernels.reference import dequantise
from chatkv.kernels.weights import FpWeight
from tests.float_source import FloatSource
from tests.kv_compare import CHUNK_TOKENS, Quality, text_part
from tests.running_service import MODEL, ROOT, RunningService

from .intervals import Interval, draw_intervals
from .quality import english
from .report import Report, median

GROUPS = (32, 64, 128)
ACROSS = 16
"""Columns from where groups begin to where the file's begin."""


@dataclass(frozen=True, slots=True)
class Case:
    spec: QuantSpec
    is_across: bool = False

    @property
    def name(self) -> str:
        return self.spec.name + " across" * self.is_across + ", searched" * self.spec.is_searched


SPECS = (
    QuantSpec("bf16"),
    QuantSpec("int8", 32),
    QuantSpec("int8-bnb"),
    QuantSpec("fp8"),
    QuantSpec("fp8", is_searched=True),
    *(QuantSpec("int4-affine", size, is_searched=search) for size in GROUPS for search in (False, True)),
    *(QuantSpec("int4", size, is_searched=search) for size in GROUPS for search in (False, True)),
    QuantSpec("nf4"),
)
CASES = (
    *map(Case, SPECS),
    *(Case(QuantSpec("int4-affine", 32, is_searched=search), is_across=True) for search in (False, True)),
)
ASKED: tuple[WeightFormat, ...] = ("as-is", "auto", "int4", "fp8", "nf4", "int8-bnb")
PREFILL_TOKENS, NUM_DECODED = 256, 15
NUM_PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 8, 48, 32


@dataclass(frozen=True, slots=True)
class Expected:
    """What the true weights say of the text."""

    ids: Sequence[int]
    logits: Tensor
    """float32 [num_tokens, vocab_size]"""
    answers: Sequence[Sequence[int]]
    """Greedy, to prompts cut from the text."""


class Model:
    """The default model's weights as float32, and decoders with these in some format."""

    def __init__(self, folder: Path):
        source = FloatSource(folder, torch.float32)
        self.config, self.shapes = source.model_config, source.shapes
        self.true = dict(source.tensors())

    def runner(self, case: Case | None, num_tokens: int) -> ModelRunner:
        def read(name: str) -> PackedTensor:
            return self.true[name] if case is None else in_format(name, self.true[name], case)

        facts = WeightFacts("", "")
        decoder = Decoder(self.config, read, facts, KernelChoice(cpu_kernels="torch"), kv_dtype="fp32")
        num_blocks = max(-(-num_tokens // BLOCK_SIZE), NUM_PROMPTS * -(-(PROMPT_TOKENS + ANSWER_TOKENS) // BLOCK_SIZE))
        return ModelRunner(decoder, num_blocks, Sampler(self.config.vocab_size))

    def bits_per_weight(self, spec: QuantSpec) -> float:
        """Of all matrices."""
        matrices = {name: shape for name, shape in self.shapes.items() if len(shape) == 2}
        specs = {name: spec_of_tensor(spec, name) or QuantSpec("bf16") for name in matrices}
        num_bytes = sum(specs[name].packed_bytes(*shape) or 0 for name, shape in matrices.items())
        return 8 * num_bytes / sum(rows * columns for rows, columns in matrices.values())


def in_format(name: str, tensor: PackedTensor, case: Case) -> PackedTensor:
    if not case.is_across or not isinstance(tensor, FpWeight):
        return converted(name, tensor, case.spec)
    made = converted(name, FpWeight(tensor.values.roll(ACROSS, dims=1)), case.spec)
    assert not isinstance(made, Tensor)
    return FpWeight(dequantise(made).roll(-ACROSS, dims=1))


def all_logits(runner: ModelRunner, ids: Sequence[int]) -> Tensor:
    parts = range(0, len(ids), CHUNK_TOKENS)
    return torch.cat([runner.all_logits(Batch([text_part(ids[i : i + CHUNK_TOKENS], i)])) for i in parts])


def greedy(runner: ModelRunner, ids: Sequence[int]) -> list[list[int]]:
    """ANSWER_TOKENS for each of NUM_PROMPTS prompts, side by side."""
    starts = range(0, len(ids) - PROMPT_TOKENS, (len(ids) - PROMPT_TOKENS) // NUM_PROMPTS)
    new = [list(ids[start : start + PROMPT_TOKENS]) for start in starts[:NUM_PROMPTS]]
    answers: list[list[int]] = [[] for _ in new]
    position = 0
    for _ in range(ANSWER_TOKENS):
        result = runner.execute(Batch([_part(tokens, position, prompt) for prompt, tokens in enumerate(new)]))
        position += len(new[0])
        new = [list(sequence.token_ids) for sequence in result.sequences]
        for answer, tokens in zip(answers, new, strict=True):
            answer += tokens
    return answers


def _part(ids: Sequence[int], start: int, prompt: int) -> ScheduledSequence:
    num_blocks = -(-(PROMPT_TOKENS + ANSWER_TOKENS) // BLOCK_SIZE)
    first, end = prompt * num_blocks, start + len(ids)
    slots = range(first * BLOCK_SIZE + start, first * BLOCK_SIZE + end)
    spec = SampleSpec(SamplingParams(temperature=0.0), 0, end, (), ())
    table = range(first, first + -(-end // BLOCK_SIZE))
    return ScheduledSequence(str(prompt), tuple(ids), start, table, slots, (spec,))


def num_equal(expected: Sequence[int], found: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b), len(expected))


def measure(model: Model, case: Case, expected: Expected, report: Report) -> Interval:
    started = time.perf_counter()
    runner = model.runner(case, len(expected.ids))
    made_s = time.perf_counter() - started
    quality = Quality()
    quality.add(expected.logits, all_logits(runner, expected.ids), expected.ids[1:])
    before, after = quality.perplexities
    answers = greedy(runner, expected.ids)
    equal = [num_equal(a, b) for a, b in zip(expected.answers, answers, strict=True)]
    name = case.name
    # How far the mean loss of another text of this length would lie elsewhere.
    differences = torch.cat(quality.losses[1]) - torch.cat(quality.losses[0])
    spread = 100 * float(differences.std()) / len(differences) ** 0.5
    bits = model.bits_per_weight(case.spec)
    report.add(f"{name}: bits a weight", bits, "")
    report.add(f"{name}: perplexity", after, "", against=before)
    report.add(f"{name}: standard error of the ratio", spread, "%")
    report.add(f"{name}: KL divergence, mean", float(quality.divergence.mean()), "nat")
    report.add(f"{name}: same most likely token", 100 * quality.agreement, "%")
    report.add(f"{name}: equal greedy tokens of {ANSWER_TOKENS}, mean", sum(equal) / len(equal), "")
    report.add(f"{name}: made and loaded", made_s, "s")
    return Interval(name, bits, 100 * (after / before - 1), spread, 100 * quality.agreement)


def measure_speed(folder: Path, ids: Sequence[int], report: Report) -> None:
    """What a person with a model of bfloat16 floats gets on the CPU, by the setting."""
    floats = folder.with_name(f".{folder.name}-floats")
    shutil.rmtree(floats, ignore_errors=True)
    floats.mkdir()
    try:
        write_weights(FloatSource(folder, torch.bfloat16), floats)
        for asked in ASKED:
            _measure_asked(floats, asked, ids, report)
    finally:
        shutil.rmtree(floats)


def _measure_asked(floats: Path, asked: WeightFormat, ids: Sequence[int], report: Report) -> None:
    started = time.perf_counter()
    load_model(floats, weight_format=asked)
    first_s, started = time.perf_counter() - started, time.perf_counter()
    model = load_model(floats, weight_format=asked)
    again_s = time.perf_counter() - started
    runner = ModelRunner(model, -(-len(ids) // BLOCK_SIZE) + 1, Sampler(model.config.vocab_size))
    started = time.perf_counter()
    runner.execute(Batch([text_part(ids, 0)]))
    prefill_s, steps = time.perf_counter() - started, []
    for position in range(len(ids), len(ids) + NUM_DECODED):
        started = time.perf_counter()
        runner.execute(Batch([text_part(ids[:1], position, is_sampled=True)]))
        steps.append(time.perf_counter() - started)
    name = f'"{asked}": {model.weight_format} on {model.kernels.partition(" ")[0]}'
    report.add(f"{name}: first load / later ones", first_s, "s", against=again_s)
    report.add(f"{name}: weights in memory", model.weight_bytes / 2**20, "MiB")
    report.add(f"{name}: prefill, {len(ids)} tokens", len(ids) / prefill_s, "tok/s")
    report.add(f"{name}: decode", 1 / median(steps), "tok/s")


def run(home: Path, num_tokens: int, picture: Path | None) -> None:
    RunningService(home).install_model()
    folder = home / "data" / "models" / MODEL
    model, report = Model(folder), Report()
    ids = english(Tokenizer.from_dir(folder), num_tokens)
    runner = model.runner(None, num_tokens)
    expected = Expected(ids, all_logits(runner, ids), greedy(runner, ids))
    del runner
    intervals = [measure(model, case, expected, report) for case in CASES]
    measure_speed(folder, ids[:PREFILL_TOKENS], report)
    report.print_table()
    if picture:
        title = f"Perplexity against the model's own numbers, {num_tokens} tokens"
        picture.write_text(draw_intervals(title, intervals), "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path, nargs="?", help="where to write an SVG")
    parser.add_argument("--home", type=Path, default=ROOT / "build" / "bench-home", help="kept between runs")
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    run(options.home, options.tokens, options.picture)
