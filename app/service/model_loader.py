"""Loading a model for real: weights, text side, pool, engine. Torch is imported in here, in the loading thread."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chatkv.app.hub.installed import InstalledModel
from chatkv.app.paths import Paths
from chatkv.app.settings import Settings
from chatkv.engine.config import BLOCK_SIZE
from chatkv.engine.errors import InvalidRequestError
from chatkv.engine.request import SamplingParams
from chatkv.engine.tiers.tier import LowerTier

from .keys import read_or_make_store_key
from .kv_store import KvStore, Runs
from .loaded import LoadedModel, Loader
from .model_views import effective_context

if TYPE_CHECKING:
    import torch

    from chatkv.engine.block_hash import BlockHasher
    from chatkv.engine.kv_layout import KVLayout

log = logging.getLogger(__name__)
_SAMPLING_FIELDS = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
HOST_SHARE = 0.25
"""Of RAM, for blocks that leave a GPU."""
HOST_LIMIT_BYTES = 16 << 30
_SHARE_OF_IMPORT = 0.2
"""Importing torch is a noticeable part of a small model's start."""


def make_loader(paths: Paths, settings: Settings, kv_store: KvStore) -> Loader:
    def load(installed: InstalledModel, on_progress: Callable[[float], None]) -> LoadedModel:
        return load_model(installed, paths, settings, kv_store, on_progress)

    return load


def load_model(
    installed: InstalledModel,
    paths: Paths,
    settings: Settings,
    kv_store: KvStore,
    on_progress: Callable[[float], None],
) -> LoadedModel:
    """
    Raises:
        EngineError: the model's files are damaged or hold what chatkv cannot run.
    """
    import torch

    from chatkv.engine.block_hash import BlockHasher, CacheFingerprint
    from chatkv.engine.config import EngineConfig
    from chatkv.engine.engine import Engine
    from chatkv.engine.engine_thread import EngineThread
    from chatkv.engine.text.run_memory import RunMemory

    from .model_device import ModelPlacer
    from .model_text import ModelText

    kv_store.attaching = None
    on_progress(_SHARE_OF_IMPORT)
    num_threads = settings.threads or num_physical_cores()
    torch.set_num_threads(num_threads)
    text = ModelText(installed.path)
    context_tokens = effective_context(installed, settings)
    eos_ids = text.tokenizer.eos_ids
    placer = ModelPlacer(
        installed,
        settings,
        context_tokens,
        text.vocab_size,
        eos_ids,
        num_threads,
        kernel_cache=paths.cache_dir / "triton",
        on_progress=lambda share: on_progress(_SHARE_OF_IMPORT + (1 - _SHARE_OF_IMPORT) * share),
    )
    decoder, runner, num_blocks, place = placer.place()
    log.info("%s runs on %s. %s %s", installed.name, decoder.kernels, place.plan, place.note)
    fingerprint = CacheFingerprint.from_facts(decoder.fingerprint_facts())
    store_key = read_or_make_store_key(paths.store_key_file)
    hasher = BlockHasher(store_key, fingerprint)
    text.memory = RunMemory(key=runs_key(store_key), kept=Runs(kv_store, fingerprint.digest))
    config = EngineConfig(
        max_context_tokens=context_tokens,
        num_blocks=num_blocks,
        max_num_seqs=settings.max_num_seqs,
        max_num_waiting=settings.max_num_waiting,
        check_integrity=settings.check_integrity,
    )
    tiers = lower_tiers(kv_store, settings, fingerprint.digest, decoder.layout, installed, decoder.device)
    constants_name = f"prefill {fingerprint.digest.hex()}"
    engine = Engine(
        config,
        runner,
        hasher,
        text.new_stream,
        eos_ids,
        tiers=tiers,
        images=runner.images if tiers else None,
        constants=kv_store.constant(constants_name),
    )
    return LoadedModel(
        installed=installed,
        context_tokens=engine.max_context_tokens,
        num_embd=decoder.config.hidden_size,
        place=place,
        weight_format=decoder.weight_format,
        weights=f"{decoder.weight_format}, {decoder.weight_origin}",
        describe_kernels=lambda: decoder.kernels,
        set_num_threads=decoder.set_num_threads,
        default_sampling=default_sampling(installed.path),
        block_bytes=decoder.layout.block_bytes,
        engine=EngineThread(engine),
        text=text,
        fingerprint=fingerprint.digest,
        hash_blocks=partial(hash_blocks, hasher),
        kv_dtype=decoder.layout.kv_dtype,
        tiers=tiers,
        on_closed=lambda: kv_store.set_constant(constants_name, engine.planner.constants),
    )


def lower_tiers(
    kv_store: KvStore,
    settings: Settings,
    fingerprint: bytes,
    layout: KVLayout,
    installed: InstalledModel,
    device: torch.device,
) -> list[LowerTier]:
    """Fastest first."""
    tiers: list[LowerTier] = []
    image_bytes = layout.block_bytes
    host_bytes = host_tier_bytes(settings, device.type)
    if host_bytes >= image_bytes:
        from chatkv.engine.tiers.host_tier import HostTier
        from chatkv.engine.tiers.locked_memory import CudaPageLocker

        locker = CudaPageLocker(device) if device.type == "cuda" else None
        tiers.append(HostTier(image_bytes, host_bytes, locker=locker))
    label = f"{installed.name}, {layout.kv_dtype} KV"
    disk = kv_store.tier_for(fingerprint, image_bytes, label, installed.content_sha256)
    return [*tiers, disk] if disk is not None else tiers


def host_tier_bytes(settings: Settings, device_type: str) -> int:
    """On the CPU the pool is host memory itself: a host tier only where it was asked for."""
    from chatkv.engine.planner import machine_memory_bytes

    if settings.kv_host_bytes is not None:
        return settings.kv_host_bytes
    return min(int(machine_memory_bytes() * HOST_SHARE), HOST_LIMIT_BYTES) if device_type == "cuda" else 0


def hash_blocks(hasher: BlockHasher, token_ids: Sequence[int]) -> list[bytes]:
    """The names of the full blocks of a prompt without extra keys."""
    hashes = [hasher.root_hash]
    for start in range(0, len(token_ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
        hashes.append(hasher.block_hash(hashes[-1], token_ids[start : start + BLOCK_SIZE]))
    return hashes[1:]


def runs_key(store_key: bytes) -> bytes:
    """Names of answers are made with a key of their own."""
    return hashlib.blake2b(b"runs", key=store_key, digest_size=32).digest()


def num_physical_cores() -> int:
    """Cores that this process may use, hyper-threads counted once."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            cores.add(((topology / "physical_package_id").read_text(), (topology / "core_id").read_text()))
        except OSError:
            return len(os.sched_getaffinity(0))
    return len(cores)


def default_sampling(native_dir: Path) -> Mapping[str, float]:
    """What the model's makers recommend in generation_config.json, as far as it is sampling and makes sense."""
    try:
        facts: Any = json.loads((native_dir / "generation_config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(facts, dict):
        return {}
    if facts.get("do_sample") is False:
        return {"temperature": 0.0}
    values = {name: facts[name] for name in _SAMPLING_FIELDS if isinstance(facts.get(name), int | float)}
    try:
        SamplingParams(**values)
    except InvalidRequestError as error:
        log.warning("generation_config.json of %s is ignored: %s", native_dir.name, error)
        return {}
    return values
