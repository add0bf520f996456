"""Where a model is loaded: on a GPU that can be used and has room, else on the CPU; weights, pool and runner there."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from chatkv.app.errors import UserError
from chatkv.app.hub.installed import InstalledModel
from chatkv.app.settings import Settings
from chatkv.engine.config import EngineConfig
from chatkv.engine.device_buffers import Buffers
from chatkv.engine.device_planner import (
    DeviceDemand,
    DevicePlan,
    allocate_pool,
    is_out_of_memory,
    loading_failed,
    plan_device,
)
from chatkv.engine.model_runner import ModelRunner
from chatkv.engine.models.decoder import Decoder
from chatkv.engine.models.native import load_model
from chatkv.engine.models.stored_weights import StoredWeights, look_at_weights
from chatkv.engine.planner import PoolTooSmallError, machine_memory_bytes, plan_pool
from chatkv.engine.sampler import Sampler
from chatkv.engine.weight_options import WeightOption, float_options, is_packed, stored_option
from chatkv.kernels import KernelChoice
from chatkv.kernels.device_facts import Card, measured
from chatkv.kernels.devices import DeviceChoice, DeviceError, choose_device, explain_launch_error, on_the_cpu

from .loaded import ModelPlace

if TYPE_CHECKING:
    from chatkv.engine.device_runner import DeviceRunner

log = logging.getLogger(__name__)
SHARE_OF_WEIGHTS = 0.7
"""Of a load on a GPU; the rest is compiling kernels and capturing steps."""
ON_THE_CPU_INSTEAD = {"fp8": "int8"}
"""KV dtypes that only GPUs have."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """How cards are found and measured; tests put others in their place."""

    choose: Callable[[Literal["auto", "cuda", "cpu"], int | None], DeviceChoice] = choose_device
    measure: Callable[[Card], Card] = measured
    name_of: Callable[[Card], str] = lambda card: f"cuda:{card.index}"
    """As `KernelChoice.device` knows it."""


class PlacedModel(NamedTuple):
    decoder: Decoder
    runner: ModelRunner | DeviceRunner
    num_blocks: int
    place: ModelPlace


@dataclass(frozen=True, slots=True)
class ModelPlacer:
    """One load of a model."""

    installed: InstalledModel
    settings: Settings
    context_tokens: int
    num_tokens: int
    """Ids of the tokenizer; rows of the head beyond them are padding."""
    eos_ids: frozenset[int]
    num_threads: int
    kernel_cache: Path
    """Where compiled GPU kernels outlive the process."""
    on_progress: Callable[[float], None]
    """Gets 0 .. 1, and may raise to stop."""
    gpus: Gpus = field(default_factory=Gpus)

    def place(self) -> PlacedModel:
        """
        Raises:
            UserError: the device that the settings ask for cannot be had.
            EngineError: the model's files are damaged, or there is too little memory.
        """
        try:
            choice = self.gpus.choose(self.settings.device, self.settings.gpu)
        except DeviceError as error:
            raise UserError(error.message, error.hint) from error
        if choice.card is None:
            return self._on_cpu(choice.note, choice.note if choice.is_surprising else "")
        placed = self._on_card_if_possible(choice, choice.card)
        if isinstance(placed, PlacedModel):
            return placed
        gc.collect()  # What was loaded so far is gone before the CPU loads the same.
        return self._on_cpu(placed, placed)

    def _on_card_if_possible(self, choice: DeviceChoice, card: Card) -> PlacedModel | str:
        """Or why the CPU has to do, where the settings leave that open."""
        try:
            return self._on_card(choice, card)
        except Exception as error:
            explained = explain_launch_error(error, card)
            if self.settings.device == "cuda":
                if explained is None:
                    raise
                raise UserError(explained.message, explained.hint) from error
            if explained is not None:
                return on_the_cpu(f"{explained.message} {explained.hint}")
            if isinstance(error, PoolTooSmallError):
                return on_the_cpu(str(error).replace(' device = "cpu" runs it on the CPU.', ""))
            if not _is_of_the_device(error):
                raise
            log.exception("%s failed", card.name)
            return f"It runs on the CPU: on {card.name} there was an error. The log tells it: {_first_line(error)}"

    def _on_card(self, choice: DeviceChoice, card: Card) -> PlacedModel:
        os.environ.setdefault("TRITON_CACHE_DIR", str(self.kernel_cache))
        from chatkv.engine.device_runner import DeviceRunner

        stored = look_at_weights(self.installed.path)
        card = self.gpus.measure(card)
        plan = self._plan(stored, card)
        log.info("%s: %s", card.name, plan.explanation)
        kernels = KernelChoice(
            device=self.gpus.name_of(card),
            compute_dtype=stored.compute_dtype,
            is_deterministic=self.settings.deterministic,
        )
        decoder = self._load_on_card(plan, kernels)
        if decoder is None:
            raise loading_failed(plan, self.gpus.measure(card).free_bytes)

        def new_runner(num_blocks: int) -> DeviceRunner:
            num_tokens = min(decoder.config.vocab_size, self.num_tokens)
            runner = DeviceRunner(decoder, num_blocks, num_tokens, self.context_tokens, self.eos_ids)
            runner.warm_up(
                plan.demand.buffers.max_num_batched_tokens,
                lambda share: self.on_progress(SHARE_OF_WEIGHTS + (1 - SHARE_OF_WEIGHTS) * share),
            )
            return runner

        plan, runner = allocate_pool(plan, lambda: self.gpus.measure(card).free_bytes, new_runner)
        note = " ".join(part for part in (choice.note, choice.warning) if part)
        place = ModelPlace("cuda", card.name, plan.explanation, note, choice.warning)
        return PlacedModel(decoder, runner, plan.num_blocks, place)

    def _load_on_card(self, plan: DevicePlan, kernels: KernelChoice) -> Decoder | None:
        """None: there is no room any more. A function of its own, so that what was loaded goes with the error."""
        try:
            return load_model(
                self.installed.path,
                kernels,
                lambda share: self.on_progress(SHARE_OF_WEIGHTS * share),
                kv_dtype=self.settings.kv_dtype,
                weight_format=plan.option.spec or "as-is",
            )
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return None

    def _plan(self, stored: StoredWeights, card: Card) -> DevicePlan:
        settings, limits = self.settings, EngineConfig(self.context_tokens, 1)
        demand = DeviceDemand(
            config=stored.config,
            max_context_tokens=self.context_tokens,
            kv_dtype=stored.compute_dtype if settings.kv_dtype == "auto" else settings.kv_dtype,
            buffers=Buffers(settings.max_num_seqs, limits.max_num_batched_tokens, limits.max_copy_bytes),
            pool_bytes=settings.kv_bytes,
            reserve_bytes=settings.gpu_reserve_bytes,
        )
        options, others = self._options(stored, card)
        return plan_device(demand, options, card, others)

    def _options(self, stored: StoredWeights, card: Card) -> tuple[Sequence[WeightOption], Sequence[WeightOption]]:
        """Formats that may be chosen, and those that "auto" would choose from."""
        if is_packed(stored.weight_format):
            return [stored_option(stored.weight_format, stored.tensors)], []
        asked = float_options(stored.config, card.capability, self.settings.weight_format)
        return asked, [] if self.settings.weight_format == "auto" else float_options(stored.config, card.capability)

    def _on_cpu(self, note: str, notice: str) -> PlacedModel:
        settings = self.settings
        kv_dtype = ON_THE_CPU_INSTEAD.get(settings.kv_dtype, settings.kv_dtype)
        if kv_dtype != settings.kv_dtype:
            note = f"{note} K and V are kept in {kv_dtype}: {settings.kv_dtype} needs a GPU.".lstrip()
        decoder = load_model(
            self.installed.path,
            KernelChoice(cpu_kernels=settings.cpu_kernels, num_threads=self.num_threads),
            self.on_progress,
            kv_dtype=kv_dtype,
            weight_format=settings.weight_format,
        )
        plan = plan_pool(
            decoder.layout,
            self.context_tokens,
            weight_bytes=decoder.weight_bytes,
            memory_bytes=machine_memory_bytes(),
            pool_bytes=settings.kv_bytes,
        )
        sampler = Sampler(min(decoder.config.vocab_size, self.num_tokens))
        runner = ModelRunner(decoder, plan.num_blocks, sampler, self.eos_ids)
        place = ModelPlace("cpu", plan=plan.explanation, note=note, notice=notice)
        return PlacedModel(decoder, runner, plan.num_blocks, place)


def _is_of_the_device(error: Exception) -> bool:
    """Raised by CUDA, by torch on it, or by Triton; nothing that is wrong with the model or with us."""
    is_tritons = type(error).__module__.partition(".")[0] == "triton"
    return is_tritons or isinstance(error, RuntimeError | subprocess.SubprocessError)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
