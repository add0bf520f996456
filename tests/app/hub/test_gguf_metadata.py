from __future__ import annotations

import struct
from pathlib import Path

import pytest
from gguf import GGUFReader

from chatkv.app.errors import UserError
from chatkv.app.hub.gguf_metadata import read_metadata
from tests.app.hub.makers import write_gguf


def test_every_key_reads_as_the_reference_reader_has_it(tmp_path: Path) -> None:
    keys = {"a.flag": True, "a.text": "häh 😀", "a.numbers": [1, 2, 3], "a.floats": [0.5, -2.0], "a.texts": ["x", ""]}
    file = write_gguf(tmp_path / "t.gguf", keys=keys)
    metadata = read_metadata(file)
    for name, field in GGUFReader(file).fields.items():
        if not name.startswith("GGUF."):
            assert metadata[name] == field.contents(), name


def test_the_default_model_reads_as_the_reference_reader_has_it(default_gguf: Path) -> None:
    metadata = read_metadata(default_gguf)
    fields = GGUFReader(default_gguf).fields
    assert set(metadata) == {name for name in fields if not name.startswith("GGUF.")}
    for name in ("general.architecture", "tokenizer.chat_template", "tokenizer.ggml.pre", "llama.rope.freq_base"):
        assert metadata[name] == fields[name].contents()
    for index in (0, 1, 300, 48_899):
        for name in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type"):
            assert metadata[name][index] == fields[name].contents(index)
    assert len(metadata["tokenizer.ggml.merges"]) == 48_900


def test_a_file_cut_anywhere_in_its_header_is_damaged(tmp_path: Path, tiny_gguf: Path) -> None:
    data = tiny_gguf.read_bytes()
    end = data.index(b"<|im_end|>\n{% endfor %}")
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 200), *range(200, end, 97)]:
        cut.write_bytes(data[:length])
        with pytest.raises(UserError, match="is damaged"):
            read_metadata(cut)


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (b"GGML" + struct.pack("<IQQ", 3, 0, 1), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 1), "GGUF version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 1), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "claims"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**63) + b"k" * 64, "damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sI", 1, b"k", 99) + b"x" * 64, "damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 2**62) + b"x" * 64, "damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 4, 2**62) + b"x" * 64, "damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q2s", 2, b"\xff\xff") + b"x" * 64, "damaged"),
    ],
)
def test_a_header_of_nonsense_is_refused_at_once(tmp_path: Path, head: bytes, says: str) -> None:
    file = tmp_path / "nonsense.gguf"
    file.write_bytes(head + b"\0" * 32)
    with pytest.raises(UserError, match=says):
        read_metadata(file)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Cannot read .*absent\.gguf: No such file"):
        read_metadata(tmp_path / "absent.gguf")
