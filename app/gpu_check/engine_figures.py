"""Blocks on their way between the card, the host's memory and the disk: the same numbers come back, and how fast."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from chatkv.engine.config import BLOCK_SIZE
from chatkv.engine.device_images import DeviceImages
from chatkv.engine.device_runner import DeviceRunner
from chatkv.engine.kv_layout import KVLayout
from chatkv.engine.models.decoder import Decoder
from chatkv.engine.tiers.host_tier import HostTier
from chatkv.engine.tiers.tier import LowerTier
from chatkv.kernels import KernelChoice
from chatkv.kernels.triton.stream import host_tensor

from .asking import Answer, AskedEngine
from .bench_device import BenchDevice
from .machine import Machine
from .random_data import fp_weight, int4_weight, int8_weight, pool_of
from .random_model import llama_config, random_decoder
from .results import Results
from .sizes import DRY, Sizes
from .small_store import NO_STORE, has_store, opened_tier

LINK_SHARE, PERSISTENCE_SHARE = 0.75, 0.01
NUM_PAIRS = 5
_POISON = 0x3C
"""A byte: numbers that nobody has computed, and that are finite in every dtype."""


class EngineFigures:
    def __init__(self, bench: BenchDevice, machine: Machine, sizes: Sizes, results: Results) -> None:
        self._bench, self._machine, self._sizes, self._results = bench, machine, sizes, results
        self._device = bench.device
        self._choice = KernelChoice(bench.kernel_device, compute_dtype=sizes.compute_dtypes[0])

    def measure(self) -> None:
        with self._results.section("blocks and the host"):
            self._transfers()
        for kv_dtype in self._sizes.kv_dtypes:
            with self._results.section("blocks come back"):
                self._round_trip(kv_dtype)
        with self._results.section("persistence"):
            self._persistence()

    def _transfers(self) -> None:
        sizes = self._sizes
        layout = KVLayout(
            sizes.num_layers, sizes.num_kv_heads, sizes.head_dim, self._sizes.compute_dtypes[0], "position"
        )
        pool, _ = pool_of(layout, sizes.num_images, self._device)
        images = DeviceImages(pool)
        count = min(images.num_free_reads, images.num_free_writes, sizes.num_images // 2)
        is_same = True
        source, target = range(count), range(sizes.num_images - count, sizes.num_images)
        # As the tiers hold images: the host's lie in page-locked memory, those from disk do not.
        locked = host_tensor(count * layout.block_bytes, torch.uint8, self._device).view(count, layout.block_bytes)
        paged = torch.empty_like(locked, pin_memory=False)
        held = {
            name: [memoryview(image.numpy()) for image in memory]
            for name, memory in (("to the device", locked), ("to the device, from disk", paged))
        }
        seconds: dict[str, list[float]] = {"to the host": [], **{name: [] for name in held}}
        self._bench.synchronize()  # copies have streams of their own
        for _ in range(10 if self._bench.is_cuda else 1):
            since = time.perf_counter()
            read = images.start_read(source)
            read.wait()
            seconds["to the host"].append(time.perf_counter() - since)
            for memory in (locked, paged):
                for row, image in zip(memory.numpy(), read.images, strict=True):
                    row[:] = image
            read.release()
            for name, images_held in held.items():
                since = time.perf_counter()
                write = images.start_write(target, images_held)
                write.wait()
                seconds[name].append(time.perf_counter() - since)
                write.release()
                is_same = is_same and torch.equal(pool[: len(source)], pool[target.start :])
                pool[target.start :].zero_()
                self._bench.synchronize()
        self._results.check(f"{count} blocks of {layout.block_bytes} bytes out and in", float(not is_same), 0.0)
        for name, durations in seconds.items():
            machine, is_from_disk = self._machine, name.endswith("disk")
            link = machine.to_host_bytes_per_s if name == "to the host" else machine.to_device_bytes_per_s
            rate = count * layout.block_bytes / sorted(durations)[len(durations) // 2]
            note = f"{rate / 1e9:.1f} GB/s" + (", filling page-locked memory included" if is_from_disk else "")
            target_share = None if is_from_disk else LINK_SHARE
            self._results.figure(f"blocks {name}", rate / link, "of the link", target_share, note=note)

    def _round_trip(self, kv_dtype: str) -> None:
        """A prompt's blocks are stored, then read back into blocks that hold other numbers meanwhile. Deterministic:
        the second time few rows are computed, and their bits are compared."""
        num_blocks = 8
        prompt = torch.randint(DRY.vocab_size, (5 * BLOCK_SIZE + 3,)).tolist()
        make = partial(fp_weight, device=self._device)
        choice = replace(self._choice, is_deterministic=True)
        decoder = random_decoder(llama_config(DRY), choice, make, kv_dtype=kv_dtype)
        image_bytes = decoder.layout.block_bytes

        def ask(tier: LowerTier) -> tuple[Answer, AskedEngine, DeviceRunner]:
            runner = self._runner(decoder, num_blocks)
            asked = AskedEngine(runner, num_blocks, num_blocks * BLOCK_SIZE, [tier])
            (answer,) = asked.ask([prompt], 4)
            asked.store_all(tier)
            return answer, asked, runner

        computed, asked, runner = ask(HostTier(image_bytes, num_blocks * image_bytes))
        asked.engine.offload(computed.block_hashes)
        runner.pool.fill_(_POISON)
        self._bench.synchronize()  # copies to the device have a stream of their own
        (restored,) = asked.ask([prompt], 4)
        self._compare(kv_dtype, "host", computed, restored)
        asked.close()
        if not has_store():
            self._results.leave_out(f"{kv_dtype} KV by way of disk", NO_STORE)
            return
        with tempfile.TemporaryDirectory(prefix="chatkv-gpu-check-") as folder:
            answers = []
            for _ in range(2):  # The second finds what the first has left.
                with opened_tier(Path(folder), image_bytes) as tier:
                    answer, asked, _ = ask(tier)
                    asked.close()
                    answers.append(answer)
            self._compare(kv_dtype, "disk", *answers)

    def _compare(self, kv_dtype: str, tier: str, computed: Answer, restored: Answer) -> None:
        num_cached = restored.cached_by_tier.get(tier, 0)
        is_same = restored.token_ids == computed.token_ids and restored.logprobs == computed.logprobs
        note = f"{num_cached} tokens from there, the same bits: {is_same}"
        is_right = is_same and num_cached == 5 * BLOCK_SIZE
        self._results.check(f"{kv_dtype} KV by way of {tier}", float(not is_right), 0.0, note)

    def _persistence(self) -> None:
        """Eight chats write at the same time, with the disk below and without; the runs take turns."""
        if not has_store():
            self._results.leave_out("decode beside the store", NO_STORE)
            return
        sizes, num_chats = self._sizes, self._sizes.num_sequences
        num_prompt, num_tokens = (64, 192) if self._bench.is_cuda else (4, 14)
        context = num_prompt + num_tokens + BLOCK_SIZE
        num_blocks = num_chats * -(-context // BLOCK_SIZE)
        make, make_head = (partial(kind, device=self._device) for kind in (int4_weight, int8_weight))
        decoder = random_decoder(llama_config(sizes), self._choice, make, make_head)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        runner = self._runner(decoder, num_blocks, context)
        for _ in range(NUM_PAIRS if self._bench.is_cuda else 1):
            prompts = torch.randint(sizes.vocab_size, (num_chats, num_prompt)).tolist()
            seconds[False].append(self._ask_s(runner, num_blocks, context, prompts, num_tokens, []))
            with (
                tempfile.TemporaryDirectory(prefix="chatkv-gpu-check-") as folder,
                opened_tier(Path(folder), decoder.layout.block_bytes) as tier,
            ):
                seconds[True].append(self._ask_s(runner, num_blocks, context, prompts, num_tokens, [tier]))
        without_s, with_s = (sorted(seconds[kind])[len(seconds[kind]) // 2] for kind in (False, True))
        note = f"{num_chats * num_tokens / without_s:.0f} tok/s without"
        name = f"what the store costs {num_chats} chats, of the time without"
        self._results.figure(name, with_s / without_s - 1, "", PERSISTENCE_SHARE, is_limit=True, note=note)

    def _runner(self, decoder: Decoder, num_blocks: int, context_tokens: int | None = None) -> DeviceRunner:
        context_tokens = context_tokens or num_blocks * BLOCK_SIZE
        runner = DeviceRunner(decoder, num_blocks, decoder.config.vocab_size, context_tokens)
        runner.warm_up(BLOCK_SIZE)
        runner.pool.fill_(_POISON)
        self._bench.synchronize()
        return runner

    @staticmethod
    def _ask_s(
        runner: DeviceRunner,
        num_blocks: int,
        context_tokens: int,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        tiers: Sequence[LowerTier],
    ) -> float:
        asked = AskedEngine(runner, num_blocks, context_tokens, tiers)
        since = time.perf_counter()
        asked.ask(prompts, num_tokens)
        seconds = time.perf_counter() - since
        asked.close()
        return seconds
