"""The weights file: used where it is mapped, and refused when its header cannot be right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from chatkv.engine.errors import BrokenModelError
from chatkv.engine.models.weights_file import WeightsWriter, content_hash, map_weights
from chatkv.engine.quant.formats import PackedTensor, parts_of
from chatkv.kernels.reference import dequantise
from chatkv.kernels.weights import FpWeight, Int4Weight

SHAPES = {"a.weight": (50, 64), "b.weight": (7,), "c.weight": (20, 96), "d.weight": (3, 5)}


def tensors() -> dict[str, PackedTensor]:
    def int4(num_rows: int, num_groups: int, *, is_affine: bool) -> Int4Weight:
        quanta = torch.randint(0, 256, (num_rows, num_groups, 16), dtype=torch.uint8)
        scales, minimums = torch.randn(2, num_rows, num_groups).half()
        return Int4Weight(quanta, scales, minimums if is_affine else None)

    return {
        "a.weight": int4(50, 2, is_affine=True),
        "b.weight": torch.randn(7),
        "c.weight": int4(20, 3, is_affine=False),
        "d.weight": FpWeight(torch.randn(3, 5)),
    }


def written(file: Path, content: dict[str, PackedTensor]) -> str:
    with file.open("wb") as opened:
        writer = WeightsWriter(opened, len(content))
        for name, tensor in content.items():
            writer.write(name, tensor)
        return writer.finish("int4-affine-g32")


def mappings(file: Path) -> list[tuple[range, str]]:
    """Addresses and permissions of the mappings of a file in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    fields = [line.split() for line in lines if line.endswith(str(file))]
    return [(range(*(int(end, 16) for end in field[0].split("-"))), field[1]) for field in fields]


def test_tensors_are_used_where_the_file_is_mapped(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    content = tensors()
    content_sha256 = written(file, content)
    weights = map_weights(file)
    assert (weights.format, weights.content_sha256) == ("chatkv-weights-2", content_sha256)
    assert weights.tensor_names == list(content)
    ((addresses, permissions),) = mappings(file)
    assert permissions == "r--s", "read-only, pages shared with the file"
    for name, shape in SHAPES.items():
        tensor = weights.read(name, shape)
        data = parts_of(name, tensor).popitem()[1]
        assert data.data_ptr() % 64 == 0
        assert data.data_ptr() in addresses
        assert data.data_ptr() + data.nbytes - 1 in addresses
        plain, expected = (t if isinstance(t, torch.Tensor) else dequantise(t) for t in (tensor, content[name]))
        assert torch.equal(plain, expected)
    del weights
    assert mappings(file), "tensors keep the mapping"
    del tensor, data, plain
    assert not mappings(file)


def test_the_hash_is_of_what_the_tensors_hold(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    content = tensors()
    content_sha256 = written(file, content)
    weights = map_weights(file)
    assert content_hash(weights, SHAPES) == content_sha256
    tiled = {name: weights.read(name, shape) for name, shape in SHAPES.items()}
    assert written(tmp_path / "again.safetensors", tiled) == content_sha256
    assert (tmp_path / "again.safetensors").read_bytes() == file.read_bytes()
    assert written(tmp_path / "other.safetensors", tensors()) != content_sha256


def test_any_safetensors_reader_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    written(file, tensors())
    with safe_open(file, framework="pt") as reader:
        assert reader.get_tensor("a.weight.t4a").shape == (4, 2, 320)
        assert reader.get_tensor("c.weight.t4").shape == (2, 3, 288)
        assert reader.get_tensor("d.weight").dtype == torch.float32


def change_header(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    file.write_bytes(data[:8] + json.dumps(header).encode().ljust(size) + data[8 + size :])


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "past the end": lambda h: h["d.weight"].update(data_offsets=[1 << 30, (1 << 30) + 60]),
    "before the start": lambda h: h["d.weight"].update(data_offsets=[-64, -4]),
    "shorter than its shape": lambda h: h["a.weight.t4a"].update(shape=[4, 3, 320]),
    "negative shape": lambda h: h["a.weight.t4a"].update(shape=[-4, -2, 320]),
    "shape of words": lambda h: h["a.weight.t4a"].update(shape=["4", 2, 320]),
    "unknown type": lambda h: h["a.weight.t4a"].update(dtype="U3"),
    "offsets of another kind": lambda h: h["d.weight"].update(data_offsets=["0", "60"]),
    "three offsets": lambda h: h["d.weight"].update(data_offsets=[0, 60, 60]),
    "no type": lambda h: h["a.weight.t4a"].pop("dtype"),
    "no metadata": lambda h: h.pop("__metadata__"),
    "no format": lambda h: h["__metadata__"].pop("format"),
    "an entry of another kind": lambda h: h.update({"e.weight": 5}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_header_is_refused(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "model.safetensors"
    written(file, tensors())
    change_header(file, lambda header: None)
    map_weights(file)
    change_header(file, DAMAGES[damage])
    with pytest.raises(BrokenModelError, match="Pull the model again"):
        map_weights(file)


@pytest.mark.parametrize("data", [b"", b"abc", b"\xff" * 64, (64).to_bytes(8, "little") + b"[" * 100, bytes(100)])
def test_what_is_no_weights_file_is_refused(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(data)
    with pytest.raises(BrokenModelError, match="Pull the model again"):
        map_weights(file)


def test_tensors_that_do_not_lie_aligned_are_copied(tmp_path: Path) -> None:
    """As in the first files of version 1."""
    file = tmp_path / "model.safetensors"
    content = tensors()
    content_sha256 = written(file, content)
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    file.write_bytes((size + 3).to_bytes(8, "little") + data[8 : 8 + size] + b"   " + data[8 + size :])
    weights = map_weights(file)
    assert content_hash(weights, SHAPES) == content_sha256
    ((addresses, _),) = mappings(file)
    for name, shape in SHAPES.items():
        (part,) = parts_of(name, weights.read(name, shape)).values()
        assert part.data_ptr() % 64 == 0
        assert part.data_ptr() not in addresses
