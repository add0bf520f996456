"""A chat goes on where it was, whatever has happened meanwhile, with the very numbers of the run that never stopped.

Counts and equality only: how fast it is stands in tests/bench/resume.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from chatkv.app.hub.pull import pull
from chatkv.app.paths import Paths
from tests.running_service import MODEL, RunningService

from .kv_chats import BLOCK, Messages, ask, check_resumed, next_turn, opening, restart, until_stored

NUM_ANSWER_TOKENS = 24
LENGTHS = [pytest.param(300, id="300 tokens"), pytest.param(4000, id="4,000 tokens", marks=pytest.mark.slow)]
BLOCK_IMAGE_BYTES = 368_640
"""Of the default model in fp16, for the size of a pool that is under pressure."""


async def two_turns(service: RunningService, messages: Messages, between: Callable[[], Any] | None = None) -> Any:
    first = await ask(service, messages, NUM_ANSWER_TOKENS)
    if between is not None:
        await until_stored(service)
        await between()
    second = await ask(service, next_turn(messages, first, 2), NUM_ANSWER_TOKENS)
    return first, second


@pytest.mark.parametrize("num_tokens", LENGTHS)
async def test_b5_a_chat_goes_on_from_disk_after_a_restart(
    service: RunningService, e2e_home: Path, num_tokens: int
) -> None:
    messages = opening(num_tokens, seed=num_tokens + 1)
    _, expected = await two_turns(service, messages)
    stopped = RunningService(e2e_home, CHATKV_CHECK_INTEGRITY="true")
    try:
        await stopped.start()
        first, second = await two_turns(stopped, messages, lambda: restart(stopped))
    finally:
        stopped.stop()
    check_resumed(first, second, expected, "disk")


@pytest.mark.slow
async def test_b4_a_chat_goes_on_after_an_idle_unload(service: RunningService, e2e_home: Path) -> None:
    messages = opening(4000, seed=11)
    _, expected = await two_turns(service, messages)
    idle = RunningService(e2e_home, CHATKV_IDLE_UNLOAD_S="1")

    async def until_unloaded() -> None:
        while (await idle.status())["model"]["state"] == "ready":
            await asyncio.sleep(0.05)

    try:
        await idle.start()
        first, second = await two_turns(idle, messages, until_unloaded)
    finally:
        idle.stop()
    check_resumed(first, second, expected, "disk")


@pytest.fixture
def two_models_home(tmp_path: Path, models_dir: Path) -> Path:
    """Beside the default model, a small one: its tokenizer and template, and weights drawn by lot."""
    home = tmp_path / "two"
    models = home / "data" / "models"
    models.mkdir(parents=True, mode=0o700)
    (models / MODEL).symlink_to(models_dir / MODEL)
    config = json.loads((models_dir / MODEL / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "hidden_size": 96, "intermediate_size": 128}
    config |= {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32}
    source = tmp_path / "random-small"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        if (models_dir / MODEL / name).exists():
            (source / name).write_bytes((models_dir / MODEL / name).read_bytes())
    save_file(random_weights(config), source / "model.safetensors")
    pull(Paths.under(home), str(source), lambda progress: None, name="random-small")
    return home


def random_weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    from chatkv.engine.models.config import ModelConfig
    from chatkv.engine.models.names import tensor_shapes

    random = torch.Generator().manual_seed(3)
    shapes = tensor_shapes(ModelConfig.from_hf(config))
    return {name: torch.randn(shape, generator=random) / shape[-1] ** 0.5 for name, shape in shapes.items()}


@pytest.mark.slow
async def test_b4_a_chat_goes_on_after_another_model_had_its_turn(
    service: RunningService, two_models_home: Path
) -> None:
    messages = opening(4000, seed=12)
    _, expected = await two_turns(service, messages)
    swapped = RunningService(two_models_home, CHATKV_CHECK_INTEGRITY="true", CHATKV_MODEL=MODEL)

    async def swap_and_back() -> None:
        other = await ask(swapped, messages, 4, model="random-small")
        assert other.num_cached_tokens == 0, "another model's blocks were used"
        again = await ask(swapped, opening(16, seed=13), 4, model=MODEL)
        assert again.cached_by_tier.get("device", 0) == 0

    try:
        await swapped.start()
        first, second = await two_turns(swapped, messages, swap_and_back)
    finally:
        swapped.stop()
    check_resumed(first, second, expected, "disk")


@asynccontextmanager
async def small_pool(home: Path, num_tokens: int) -> AsyncIterator[RunningService]:
    """A service whose pool holds that many tokens and no more."""
    num_blocks = -(-num_tokens // BLOCK)
    sizes = {"CHATKV_KV_BYTES": str(num_blocks * BLOCK_IMAGE_BYTES), "CHATKV_CONTEXT_TOKENS": str(num_tokens)}
    running = RunningService(home, CHATKV_CHECK_INTEGRITY="true", **sizes)
    try:
        await running.start()
        yield running
    finally:
        running.stop()


@pytest.mark.slow
@pytest.mark.parametrize(("num_tokens", "pool_tokens"), [(300, 500), (4000, 5000)])
async def test_c7_a_chat_goes_on_after_others_have_pressed_it_out_of_the_pool(
    service: RunningService, e2e_home: Path, num_tokens: int, pool_tokens: int
) -> None:
    messages = opening(num_tokens, seed=num_tokens + 3)
    _, expected = await two_turns(service, messages)
    async with small_pool(e2e_home, pool_tokens) as pressed:

        async def press() -> None:
            for seed in range(2):
                await ask(pressed, opening(num_tokens, seed=1000 + seed), 2)

        first, second = await two_turns(pressed, messages, press)
    check_resumed(first, second, expected, "disk")


@pytest.mark.parametrize(
    ("num_tokens", "num_rounds"), [(120, 3), pytest.param(1500, 10, marks=pytest.mark.slow, id="1,500 tokens")]
)
async def test_d5_two_chats_that_exceed_the_pool_compute_only_their_new_tokens(
    e2e_home: Path, num_tokens: int, num_rounds: int
) -> None:
    pool_tokens = num_tokens + num_rounds * 48 + 64
    async with small_pool(e2e_home, pool_tokens) as narrow:
        chats = [opening(num_tokens, seed=21), opening(num_tokens, seed=22)]
        lengths = [0, 0]
        tiers: set[str] = set()
        for turn in range(num_rounds):
            for number, messages in enumerate(chats):
                reply = await ask(narrow, messages, 8)
                num_new = reply.num_prompt_tokens - lengths[number]
                assert reply.num_computed_tokens <= num_new + 2 * BLOCK, (turn, number, reply)
                tiers |= {tier for tier, count in reply.cached_by_tier.items() if count}
                lengths[number] = reply.num_prompt_tokens + 8
                chats[number] = next_turn(messages, reply, 100 * number + turn)
        assert sum(lengths) > pool_tokens, "both chats fit into the pool: nothing was proven"
        assert "disk" in tiers
