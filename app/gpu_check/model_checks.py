"""A whole model on the card against float32 arithmetic on the CPU, on the same weights: teacher-forced.

The default model where it is at hand; a dry run, and a machine without it, take a random one of two layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from chatkv.engine.batch import Batch, ScheduledSequence
from chatkv.engine.config import BLOCK_SIZE
from chatkv.engine.device_runner import DeviceRunner
from chatkv.engine.model_runner import ModelRunner
from chatkv.engine.models.decoder import Decoder
from chatkv.engine.sampler import Sampler
from chatkv.kernels import KernelChoice

from .bench_device import BenchDevice
from .installed_model import installed_model
from .random_data import fp_weight
from .random_model import llama_config, random_decoder
from .results import Results
from .sizes import DRY, ComputeDtype, Sizes

TOLERANCES = {"bf16": 6e-2, "fp16": 1e-2}
"""Of the largest logit: each layer rounds to the compute dtype some ten times."""
EIGHT_BIT_KV = 4e-2
"""More, where K and V have 8 bits."""
CHUNK_TOKENS = 64
NUM_TOKENS, DRY_NUM_TOKENS = 512, 40

LoadModel = Callable[[KernelChoice, str], Decoder]


class ModelChecks:
    def __init__(self, bench: BenchDevice, sizes: Sizes, results: Results, model_dir: Path | None) -> None:
        self._bench, self._sizes, self._results = bench, sizes, results
        self._model_dir = None if not bench.is_cuda else installed_model(model_dir)
        self._num_tokens = NUM_TOKENS if self._model_dir else DRY_NUM_TOKENS

    def run(self) -> None:
        name = "a random model" if self._model_dir is None else self._model_dir.name
        with self._results.section(f"logits of {name}"), torch.inference_mode():
            load = self._loader()
            reference = load(KernelChoice(cpu_kernels="torch"), "fp32")
            ids = self._ids(reference.config.vocab_size)
            expected = _all_logits(ModelRunner(reference, self._num_blocks, Sampler(reference.config.vocab_size)), ids)
            for compute_dtype in self._sizes.compute_dtypes:
                for kv_dtype in self._sizes.kv_dtypes:
                    self._compare(load, ids, expected, compute_dtype, kv_dtype)

    @property
    def _num_blocks(self) -> int:
        return -(-self._num_tokens // BLOCK_SIZE)

    def _compare(
        self, load: LoadModel, ids: list[int], expected: Tensor, compute_dtype: ComputeDtype, kv_dtype: str
    ) -> None:
        model = load(KernelChoice(self._bench.kernel_device, compute_dtype=compute_dtype), kv_dtype)
        runner = DeviceRunner(model, self._num_blocks, model.config.vocab_size, self._num_tokens)
        runner.pool.zero_()
        found = _all_logits(runner, ids)
        error = float((found - expected).abs().max() / expected.abs().max())
        agreement = float((found.argmax(-1) == expected.argmax(-1)).float().mean())
        allowed = TOLERANCES[compute_dtype] + (EIGHT_BIT_KV if kv_dtype in ("int8", "fp8") else 0.0)
        note = f"same likeliest token for {agreement:.1%} of {len(ids)}"
        self._results.check(f"{compute_dtype}, {kv_dtype} KV", error, allowed, note)

    def _loader(self) -> LoadModel:
        if self._model_dir is None:
            config = llama_config(DRY)

            def load_random(choice: KernelChoice, kv_dtype: str) -> Decoder:
                torch.manual_seed(1)  # the same weights each time
                return random_decoder(config, choice, partial(fp_weight, device=torch.device("cpu")), kv_dtype=kv_dtype)

            return load_random
        from chatkv.engine.models.native import load_model

        folder = self._model_dir
        return lambda choice, kv_dtype: load_model(folder, choice, kv_dtype=kv_dtype)

    def _ids(self, vocab_size: int) -> list[int]:
        """A text where there is a tokenizer for it, else random ids."""
        if self._model_dir is not None:
            from pydoc_data.topics import topics

            from chatkv.engine.text.tokenizer import Tokenizer

            return Tokenizer.from_dir(self._model_dir).encode_run(topics["objects"])[: self._num_tokens]
        return torch.randint(vocab_size, (self._num_tokens,)).tolist()


def _all_logits(runner: ModelRunner | DeviceRunner, ids: list[int]) -> Tensor:
    """float32 [len(ids), vocab_size], read in chunks; each sees those before it in the pool."""
    parts = []
    for start in range(0, len(ids), CHUNK_TOKENS):
        stop = min(start + CHUNK_TOKENS, len(ids))
        table = range(-(-stop // BLOCK_SIZE))
        sequence = ScheduledSequence("text", ids[start:stop], start, table, range(start, stop))
        parts.append(runner.all_logits(Batch([sequence])).cpu())
    return torch.cat(parts)
