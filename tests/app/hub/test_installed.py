from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from chatkv.app.errors import UserError
from chatkv.app.hub.installed import MANIFEST, get_installed, list_installed, remove
from chatkv.app.paths import Paths
from tests.app.hub.makers import PullLog


def rewrite(file: Path, change: Callable[[dict[str, object]], object]) -> None:
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda file: file.unlink(), "it has no chatkv.json"),
        (lambda file: file.write_text("{"), "cannot be read"),
        (lambda file: file.write_text("[]"), "cannot be read"),
        (lambda file: file.write_bytes(b"\xff\xfe"), "cannot be read"),
        (lambda file: rewrite(file, lambda m: m.pop("files")), "cannot be read"),
        (lambda file: rewrite(file, lambda m: m.update(num_params=None)), "cannot be read"),
        (lambda file: rewrite(file, lambda m: m.update(format_version=99)), "another version of chatkv"),
        (lambda file: (file.parent / "model.safetensors").write_bytes(b""), "has 0 bytes instead of"),
        (lambda file: (file.parent / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    ],
)
def test_a_damaged_model_is_listed_with_its_problem_and_can_be_removed(
    log: PullLog, tiny_gguf: Path, damage: Callable[[Path], object], says: str
) -> None:
    damage(log.pull(tiny_gguf).path / MANIFEST)
    log.pull(tiny_gguf, name="whole")
    broken, whole = list_installed(log.paths)
    assert whole.is_usable
    assert says in broken.problem
    with pytest.raises(UserError, match="'tiny' is damaged"):
        get_installed(log.paths, "tiny")
    remove(log.paths, "tiny")
    assert [model.name for model in list_installed(log.paths)] == ["whole"]


def test_no_models_folder_means_no_models(home: Path) -> None:
    assert list_installed(Paths.from_env()) == []


def test_a_removal_that_is_cut_short_leaves_nothing_listed(
    log: PullLog, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.pull(tiny_gguf)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("shutil.rmtree", refuse)
    with pytest.raises(UserError, match="Cannot remove the model 'tiny': Permission denied"):
        remove(log.paths, "tiny")
    assert list_installed(log.paths) == []


def test_missing_models_are_named_with_installed_ones_that_are_near(log: PullLog, tiny_gguf: Path) -> None:
    log.pull(tiny_gguf)
    with pytest.raises(UserError, match="Installed and similar: tiny"):
        get_installed(log.paths, "tinny")
