"""The native directory: config.json and model.safetensors with packed tensors, written once, then only mapped.

The content hash in the weights file is trusted while size and mtime are those that `chatkv.json` recorded at import;
otherwise it is computed again.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chatkv.kernels import backend_for

from ..errors import BrokenModelError
from ..quant.formats import PackedTensor, format_of, parts_of, shape_of, tensor_from_parts, tensor_names
from .config import ModelConfig
from .decoder import AUTO, Decoder, WeightFacts
from .names import tensor_shapes
from .source import WeightSource, read_config
from .weights_file import FORMAT, PADDING, WeightsWriter, content_hash, opened_weights

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
MANIFEST_FILE = "chatkv.json"


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
        writer = WeightsWriter(file, max_parts=3 * len(shapes))
        for name, tensor in source.tensors():
            if shape_of(tensor) != shapes[name]:
                raise BrokenModelError(f"Tensor {name} has shape {shape_of(tensor)}, expected {shapes[name]}.")
            formats[format_of(tensor)] += math.prod(shapes[name])
            for part_name, part in parts_of(name, tensor).items():
                done_bytes += writer.write(part_name, part)
            if on_progress:
                on_progress(done_bytes, source.total_bytes)
        weight_format = formats.most_common(1)[0][0]
        content_sha256 = writer.finish(weight_format)
    (dest_dir / CONFIG_FILE).write_text(json.dumps(source.hf_config, indent=2) + "\n", encoding="utf-8")
    return WeightsInfo(content_sha256, done_bytes, weight_format, formats.total())


def load_model(
    native_dir: Path,
    device: str = "cpu",
    on_progress: Callable[[float], None] | None = None,
    *,
    kv_dtype: str = AUTO,
) -> Decoder:
    """Map an imported model and lay its weights out for `device`. `on_progress` gets 0 .. 1.

    kv_dtype: "auto" (on the CPU fp32), or "int8" for nearly four times the context in the same memory and on disk.
    Raises BrokenModelError when the directory is damaged or was changed after import.
    """
    config = ModelConfig.from_hf(read_config(native_dir))
    file = native_dir / WEIGHTS_FILE
    with opened_weights(file) as reader:
        metadata = reader.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise BrokenModelError(f"{file} was not written by this version of chatkv. Pull the model again.")
        if not _is_unchanged(native_dir) and content_hash(file) != metadata["content_sha256"]:
            raise BrokenModelError(f"{file} has changed since it was imported: it is damaged. Pull the model again.")
        names = {name for name in reader.keys() if not name.startswith(PADDING)}  # noqa: SIM118 (not a mapping)
        shapes = tensor_shapes(config)
        if tensor_names(names) != shapes.keys():
            raise BrokenModelError(f"{file} and config.json do not fit together. Pull the model again.")

        def read(name: str) -> PackedTensor:
            parts = {part: reader.get_tensor(part) for part in names if part == name or part.startswith(f"{name}.")}
            tensor = tensor_from_parts(name, parts)
            if shape_of(tensor) != shapes[name]:
                raise BrokenModelError(f"Tensor {name} has shape {shape_of(tensor)}, expected {shapes[name]}.")
            return tensor

        facts = WeightFacts(metadata["content_sha256"], metadata["weight_format"])
        return Decoder(config, read, facts, backend_for(device), on_progress, kv_dtype)


def _is_unchanged(native_dir: Path) -> bool:
    """Whether size and mtime of the weights are those of the import."""
    try:
        manifest = json.loads((native_dir / MANIFEST_FILE).read_text(encoding="utf-8"))
        recorded = manifest["files"][WEIGHTS_FILE]
        status = (native_dir / WEIGHTS_FILE).stat()
        return (recorded["size"], recorded["mtime_ns"]) == (status.st_size, status.st_mtime_ns)
    except (OSError, ValueError, KeyError, TypeError):
        return False
