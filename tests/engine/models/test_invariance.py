"""A row's bits depend on its own tokens only (DESIGN.md section 9): compared bit for bit, never within a tolerance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from invariance_checks import check_invariance
from tiny import BASE, decoder_of, logits_of, random_ids, runner_of, sequence

MODELS: dict[str, dict[str, Any]] = {
    # Widths that no vector length divides, one KV head, and groups of 1, 3 and 7.
    "group-3": {"architectures": ["LlamaForCausalLM"]},
    "group-1-odd-widths": {
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": 6,
        "intermediate_size": 131,
        "hidden_size": 90,
        "head_dim": 10,
    },
    "group-7": {
        "architectures": ["Qwen3ForCausalLM"],
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "head_dim": 48,
        "intermediate_size": 2000,
    },
    "window": {"architectures": ["MistralForCausalLM"], "sliding_window": 300},
}
NUM_TOKENS = 560


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_chunks_batches_and_hits_keep_every_bit(name: str, threads: int, kv_dtype: str) -> None:
    model = decoder_of(BASE | MODELS[name], kv_dtype=kv_dtype)
    check_invariance(runner_of(model, num_blocks=480), random_ids(NUM_TOKENS, 211, seed=3))


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8"])
def test_thread_counts_give_the_same_bits(kv_dtype: str) -> None:
    ids = random_ids(300, 211)
    before = torch.get_num_threads()
    found = []
    for count in (1, 2):
        torch.set_num_threads(count)
        found += logits_of(
            runner_of(decoder_of(BASE | MODELS["group-3"], kv_dtype=kv_dtype)), sequence(ids, 0, range(20))
        )
    torch.set_num_threads(before)
    assert torch.equal(*found)


def test_a_change_of_threads_is_measured_again() -> None:
    model = decoder_of(BASE | MODELS["group-3"])
    ids = random_ids(120, 211)
    before = torch.get_num_threads()
    torch.set_num_threads(1 if before > 1 else 2)
    try:
        check_invariance(runner_of(model), ids)
    finally:
        torch.set_num_threads(before)
