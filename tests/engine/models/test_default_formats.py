"""The default model, as if it had come as bfloat16 floats, in formats that are made of floats: what a text's next token
is said to be changes little, and answers stay answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import runner_of, sequence
from tokenizers import Tokenizer

from chatkv.engine.batch import Batch
from chatkv.engine.model_runner import ModelRunner
from chatkv.engine.models.native import load_model, write_weights
from chatkv.engine.models.source import open_source
from chatkv.engine.quant.spec import WeightFormat
from tests.float_source import FloatSource
from tests.kv_compare import compare

pytestmark = pytest.mark.slow

TEXT = (
    "The lighthouse stood at the end of the long stone pier, and every evening its keeper climbed the hundred and "
    "twelve steps with a can of oil in one hand and a book in the other. Ships from the north carried timber and "
    "salted fish; ships from the south brought oranges, copper wire and letters. In winter the wind blew so hard "
    "that the windows rang like glasses at a wedding, and the keeper read aloud to drown it out. "
)
BOUNDS: dict[WeightFormat, tuple[str, float, float]] = {
    "auto": ("int8-g32", 1.02, 0.95),
    "int4": ("int4-affine-g32", 1.06, 0.85),
    "fp8": ("fp8", 1.06, 0.88),
    "int8-bnb": ("int8-bnb", 1.02, 0.95),
    "nf4": ("nf4", 1.25, 0.6),
}
"""What is asked for -> what runs, growth of perplexity, share of equal most likely tokens."""


@pytest.fixture(scope="module")
def folder(default_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    packed, floats = tmp_path_factory.mktemp("packed"), tmp_path_factory.mktemp("floats")
    write_weights(open_source(default_gguf), packed)
    write_weights(FloatSource(packed, torch.bfloat16), floats)
    return floats


@pytest.fixture(scope="module")
def tokenizer(default_gguf: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    slow_to_load = AutoTokenizer.from_pretrained(default_gguf.parent, gguf_file=default_gguf.name)
    return slow_to_load.backend_tokenizer


@pytest.fixture(scope="module")
def as_floats(folder: Path) -> ModelRunner:
    return runner_of(load_model(folder), 20)


def continued(runner: ModelRunner, tokenizer: Any, text: str, num_tokens: int = 8) -> str:
    """Greedy."""
    new = tokenizer.encode(text).ids
    start, found = 0, []
    for _ in range(num_tokens):
        result = runner.execute(Batch([sequence(new, start, range(4), samples=1)]))
        start += len(new)
        new = list(result.sequences[0].token_ids)
        found += new
    return str(tokenizer.decode(found))


@pytest.mark.parametrize("asked", BOUNDS)
def test_a_text_is_read_nearly_alike(folder: Path, as_floats: ModelRunner, tokenizer: Any, asked: WeightFormat) -> None:
    model = load_model(folder, weight_format=asked)
    weight_format, max_growth, min_agreement = BOUNDS[asked]
    assert model.weight_format == weight_format
    runner = runner_of(model, 20)
    quality = compare(as_floats, runner, tokenizer.encode(TEXT).ids)
    before, after = quality.perplexities
    assert after / before < max_growth
    assert quality.agreement > min_agreement
    assert "Paris" in continued(runner, tokenizer, "The capital of France is")
    assert model.weight_bytes < 0.75 * as_floats.model.weight_bytes or asked == "fp8"
