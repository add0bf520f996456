"""The default model against transformers, on the same weights in float32, and against itself bit for bit.

The torch path computes what transformers computes; the native kernels round activations to 8 bits, so they are held to
a small divergence from the torch path.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from invariance_checks import check_invariance
from tiny import logits_of, random_ids, runner_of, sequence
from tokenizers import Tokenizer

from chatkv.engine.batch import Batch
from chatkv.engine.model_runner import ModelRunner
from chatkv.engine.models.decoder import Decoder
from chatkv.engine.models.native import load_model, write_weights
from chatkv.engine.models.source import open_source
from chatkv.kernels import KernelChoice
from chatkv.kernels.reference import dequantise
from tests.kv_compare import compare

pytestmark = pytest.mark.slow

TORCH = KernelChoice(cpu_kernels="torch")

PROMPTS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain in two sentences how a bicycle stays upright.",
    "List three fruits and their colours.",
    "def fibonacci(n):",
    "Translate to Spanish: good morning, my friend.",
    "Why is the sky blue?",
    "Once upon a time, in a village by a river,",
    "How many legs do two spiders have?",
    "Give me a recipe for pancakes.",
)
TEXT = (
    "The lighthouse stood at the end of the long stone pier, and every evening its keeper climbed the hundred and "
    "twelve steps with a can of oil in one hand and a book in the other. Ships from the north carried timber and "
    "salted fish; ships from the south brought oranges, copper wire and letters. In winter the wind blew so hard "
    "that the windows rang like glasses at a wedding, and the keeper read aloud to drown it out. "
)


@pytest.fixture(scope="module")
def folder(default_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    write_weights(open_source(default_gguf), folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Decoder:
    return load_model(folder, TORCH)


@pytest.fixture
def runner(model: Decoder) -> ModelRunner:
    return runner_of(model, num_blocks=400)


@pytest.fixture(scope="module")
def peer(default_gguf: Path) -> torch.nn.Module:
    """transformers with the very numbers that the packed tensors hold."""
    from transformers import LlamaConfig, LlamaForCausalLM

    source = open_source(default_gguf)
    fields = {k: v for k, v in source.hf_config.items() if k not in ("architectures", "model_type")}
    peer = LlamaForCausalLM(LlamaConfig(**fields)).eval()
    tensors = {n: t if isinstance(t, torch.Tensor) else dequantise(t) for n, t in source.tensors()}
    keys = peer.load_state_dict(tensors, strict=False)
    assert keys.missing_keys == ["lm_head.weight"]
    assert not keys.unexpected_keys
    return peer


@pytest.fixture(scope="module")
def tokenizer(default_gguf: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    slow_to_load = AutoTokenizer.from_pretrained(default_gguf.parent, gguf_file=default_gguf.name)
    return slow_to_load.backend_tokenizer


def greedy(runner: ModelRunner, ids: list[int], count: int) -> list[int]:
    table = list(range(-(-(len(ids) + count) // 16)))
    found: list[int] = []
    pending, start = ids, 0
    for _ in range(count):
        (result,) = runner.execute(Batch([sequence(pending, start, table, samples=1)])).sequences
        assert result.error is None
        start, pending = start + len(pending), list(result.token_ids)
        found += pending
    return found


def peer_greedy(peer: torch.nn.Module, ids: list[int], count: int) -> tuple[list[int], list[float]]:
    """Ids, and the distance between the two best logits at each."""
    found, gaps, cache, pending = [], [], None, ids
    with torch.inference_mode():
        for _ in range(count):
            output = peer(torch.tensor([pending]), past_key_values=cache, use_cache=True)
            cache, best = output.past_key_values, output.logits[0, -1].topk(2)
            pending = [int(best.indices[0])]
            found += pending
            gaps.append(float(best.values[0] - best.values[1]))
    return found, gaps


@pytest.mark.parametrize("prompt", PROMPTS)
def test_64_greedy_tokens_equal_transformers(
    runner: ModelRunner, peer: torch.nn.Module, tokenizer: Tokenizer, prompt: str
) -> None:
    text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    expected, gaps = peer_greedy(peer, ids, 64)
    found = greedy(runner, ids, 64)
    first = next((i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b), None)
    assert first is None or gaps[first] < 1e-4, f"token {first}: {found} {expected} {gaps}"


def test_logits_of_a_600_token_prompt_equal_transformers(
    runner: ModelRunner, peer: torch.nn.Module, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(TEXT * 8, add_special_tokens=False).ids[:600]
    assert len(ids) == 600
    with torch.inference_mode():
        expected = peer(torch.tensor([ids])).logits[0]
    (found,) = logits_of(runner, sequence(ids, 0, range(38)))
    assert (found - expected).abs().max() < 1e-3


@pytest.mark.parametrize("kv_dtype", ["fp16", "int8"])
def test_native_kernels_say_nearly_what_torch_says(
    runner: ModelRunner, folder: Path, tokenizer: Tokenizer, kv_dtype: str
) -> None:
    ids = tokenizer.encode(TEXT * 4, add_special_tokens=False).ids
    model = load_model(folder, kv_dtype=kv_dtype)
    assert model.kernels.startswith("native")
    quality = compare(runner, runner_of(model, 30), ids)
    expected, found = quality.perplexities
    assert quality.divergence.mean() < 0.003
    assert quality.agreement > 0.98
    assert found < 1.01 * expected


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("kv_dtype", ["fp16", "int8"])
def test_every_way_to_compute_a_prompt_gives_the_same_bits_on_native_kernels(
    folder: Path, threads: int, kv_dtype: str
) -> None:
    model = load_model(folder, KernelChoice(num_threads=threads), kv_dtype=kv_dtype)
    check_invariance(runner_of(model, num_blocks=400), random_ids(600, 49152, seed=5))


@pytest.mark.parametrize(("threads", "kv_dtype"), [(1, "fp32"), (2, "fp32"), (2, "int8")])
def test_every_way_to_compute_a_prompt_gives_the_same_bits(
    model: Decoder, folder: Path, threads: int, kv_dtype: str
) -> None:
    if kv_dtype == "int8":
        model = load_model(folder, TORCH, kv_dtype=kv_dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check_invariance(runner_of(model, num_blocks=400), random_ids(600, 49152, seed=5))
    finally:
        torch.set_num_threads(before)
