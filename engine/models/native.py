"""The native directory: config.json and model.safetensors with packed tensors, written once, then only mapped.

The content hash in the weights file is trusted while size and mtime are those that `chatkv.json` recorded at import;
otherwise it is computed again.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from chatkv.kernels import KernelChoice
from chatkv.kernels.bnb import NoBitsandbytesError

from ..errors import BrokenModelError, ModelStorageError, UnsupportedModelError
from ..quant.formats import format_of, shape_of
from ..quant.spec import QuantSpec, WeightFormat
from .config import ModelConfig
from .conversion import changed_since_import, convert_weights
from .decoder import AUTO, Decoder, WeightFacts
from .manifest import WEIGHTS_FILE, has_unchanged_weights, lacks_weights_record, record_weights
from .names import tensor_shapes
from .quantised import quantised_weights
from .source import WeightSource, read_config
from .weight_choice import AS_IN_FILE, choose_weights
from .weights_file import FORMAT, FORMAT_1, MappedWeights, WeightsWriter, content_hash, map_weights

CONFIG_FILE = "config.json"
_SHARE_OF_CONVERSION = 0.5
"""Of a first load that rewrites the weights."""
_SHARE_OF_QUANTISING = 0.9
"""Of a first load that makes weights in another format."""


@dataclass(frozen=True, slots=True)
class WeightsInfo:
    """What an import wrote."""

    content_sha256: str
    num_bytes: int
    weight_format: str
    num_params: int


def write_weights(
    source: WeightSource, dest_dir: Path, on_progress: Callable[[int, int], None] | None = None
) -> WeightsInfo:
    """Write model.safetensors and config.json into the existing folder `dest_dir`, synced to disk.

    `on_progress(done_bytes, total_bytes)` is called after each tensor and may raise to stop. On any error the folder
    holds a partial file: the caller gives a folder of its own and renames it when all is done.
    """
    shapes = tensor_shapes(source.model_config)
    formats: Counter[str] = Counter()
    done_bytes = 0
    with (dest_dir / WEIGHTS_FILE).open("wb") as file:
        writer = WeightsWriter(file, max_tensors=len(shapes))
        for name, tensor in source.tensors():
            if shape_of(tensor) != shapes[name]:
                raise BrokenModelError(f"Tensor {name} has shape {shape_of(tensor)}, expected {shapes[name]}.")
            formats[format_of(tensor)] += math.prod(shapes[name])
            done_bytes += writer.write(name, tensor)
            if on_progress:
                on_progress(done_bytes, source.total_bytes)
        weight_format = formats.most_common(1)[0][0]
        content_sha256 = writer.finish(weight_format)
    (dest_dir / CONFIG_FILE).write_text(json.dumps(source.hf_config, indent=2) + "\n", encoding="utf-8")
    return WeightsInfo(content_sha256, done_bytes, weight_format, formats.total())


def load_model(
    native_dir: Path,
    choice: KernelChoice | None = None,
    on_progress: Callable[[float], None] | None = None,
    *,
    kv_dtype: str = AUTO,
    weight_format: WeightFormat | QuantSpec = "as-is",
) -> Decoder:
    """Map an imported model and prepare it for the kernels of `choice`. `on_progress` gets 0 .. 1.

    kv_dtype: "auto" (what the kernels prefer: native ones fp16, torch fp32), or "int8" for less memory and disk.
    weight_format: what float matrices become, made once and kept in the directory (`choose_weights`, `quantised`).
    Weights that an earlier version of chatkv imported are rewritten first. Raises BrokenModelError when the directory
    is damaged or was changed after import, ModelStorageError when there is no room for weights in another format,
    UnsupportedModelError when they cannot be made.
    """
    config = ModelConfig.from_hf(read_config(native_dir))
    shapes = tensor_shapes(config)
    weights, report = _mapped(native_dir, shapes, on_progress or (lambda share: None))
    if not has_unchanged_weights(native_dir):
        if content_hash(weights, shapes) != weights.content_sha256:
            raise changed_since_import(native_dir)
        if lacks_weights_record(native_dir):
            record_weights(native_dir)
    choice = choice or KernelChoice()
    chosen = choose_weights(weight_format, choice, config, weights, shapes)
    facts = WeightFacts(weights.content_sha256, weights.weight_format, origin=chosen.reason)
    if chosen.spec is not None:
        try:
            made, report = _made(native_dir, weights, shapes, chosen.spec, report)
        except ModelStorageError as error:
            if weight_format != "auto":
                raise
            facts = replace(facts, origin=f"{AS_IN_FILE}. {error}")
        else:
            quantiser = chosen.spec.facts() | {"content_sha256": made.content_sha256}
            facts = WeightFacts(weights.content_sha256, made.weight_format, quantiser, chosen.reason)
            weights = made
    try:
        decoder = Decoder(config, lambda name: weights.read(name, shapes[name]), facts, choice, report, kv_dtype)
    except NoBitsandbytesError as error:  # It was there when the weights were made.
        raise UnsupportedModelError(f"Weights in {weights.weight_format} cannot be read: {error}.") from None
    report(1.0)  # Native kernels have nothing to prepare: they read the mapped file.
    return decoder


def _mapped(
    native_dir: Path, shapes: Mapping[str, tuple[int, ...]], report: Callable[[float], None]
) -> tuple[MappedWeights, Callable[[float], None]]:
    """The weights in the present version's format, and what reports the progress of the rest."""
    file = native_dir / WEIGHTS_FILE
    weights = map_weights(file)
    if weights.format not in (FORMAT, FORMAT_1):
        raise BrokenModelError(f"{file} was not written by this version of chatkv. Pull the model again.")
    if set(weights.tensor_names) != shapes.keys():
        raise BrokenModelError(f"{file} and config.json do not fit together. Pull the model again.")
    if weights.format == FORMAT:
        return weights, report
    convert_weights(native_dir, shapes, lambda share: report(share * _SHARE_OF_CONVERSION))
    return map_weights(file), _rest(report, _SHARE_OF_CONVERSION)


def _made(
    native_dir: Path,
    source: MappedWeights,
    shapes: Mapping[str, tuple[int, ...]],
    spec: QuantSpec,
    report: Callable[[float], None],
) -> tuple[MappedWeights, Callable[[float], None]]:
    """The weights in another format, and what reports the progress of the rest."""
    is_new = False

    def on_progress(share: float) -> None:
        nonlocal is_new
        is_new = True
        report(share * _SHARE_OF_QUANTISING)

    made = quantised_weights(native_dir, source, shapes, spec, on_progress)
    return made, _rest(report, _SHARE_OF_QUANTISING) if is_new else report


def _rest(report: Callable[[float], None], done: float) -> Callable[[float], None]:
    return lambda share: report(done + share * (1 - done))
