from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from chatkv.app.errors import UserError
from chatkv.app.hub import pull as pull_module
from chatkv.app.hub.installed import get_installed, list_installed, remove
from chatkv.app.hub.pull import PullPlan, plan_pull
from chatkv.app.hub.reports import PullCancelled
from chatkv.app.hub.specs import FileSpec
from tests.app.hub.makers import TINY_TOKENS, PullLog, sha256, write_gguf


def plan_of(monkeypatch: pytest.MonkeyPatch, *files: Path, sha: str | None = None, name: str = "tiny") -> None:
    """Make every pull mean these sources."""
    plan = PullPlan(name, tuple(FileSpec(file) for file in files), "MIT", sha, 0)
    monkeypatch.setattr(pull_module, "plan_pull", lambda *_: plan)


def test_a_gguf_on_disk_becomes_an_installed_model(log: PullLog, tiny_gguf: Path) -> None:
    model = log.pull(tiny_gguf)
    assert model == get_installed(log.paths, "tiny")
    assert {file.name for file in model.path.iterdir()} == {
        "chatkv.json",
        "config.json",
        "chat_template.jinja",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert model.source == f"file:{tiny_gguf}"
    assert model.licence == "mit"
    assert model.eos_token_ids == (TINY_TOKENS.index("<|im_end|>"),)
    assert model.bos_token_id == TINY_TOKENS.index("<|im_start|>")
    assert model.context_tokens == 128
    assert log.stages == ["resolve", "download", "import", "done"]
    assert tiny_gguf.exists()


def test_progress_never_exceeds_its_total_and_ends_at_it(log: PullLog, tiny_gguf: Path) -> None:
    log.pull(tiny_gguf)
    imports = [report for report in log.reports if report.stage == "import"]
    assert all(report.done_bytes <= report.total_bytes for report in imports)
    assert imports[-1].done_bytes == imports[-1].total_bytes > 0
    assert [report.done_bytes for report in imports] == sorted(report.done_bytes for report in imports)


def test_an_installed_model_is_not_pulled_again(log: PullLog, tiny_gguf: Path) -> None:
    first = log.pull(tiny_gguf)
    log.reports.clear()
    assert log.pull(tiny_gguf) == first
    assert log.stages == ["resolve", "done"]


def test_a_name_that_is_taken_by_another_source_is_refused(log: PullLog, tiny_gguf: Path, tmp_path: Path) -> None:
    log.pull(tiny_gguf)
    other = write_gguf(tmp_path / "other.gguf")
    with pytest.raises(UserError, match=r"Another model is installed as 'tiny'"):
        log.pull(other, name="tiny")
    assert log.pull(other, name="tiny-2").name == "tiny-2"


def test_a_damaged_model_is_replaced(log: PullLog, tiny_gguf: Path) -> None:
    model = log.pull(tiny_gguf)
    (model.path / "tokenizer.json").unlink()
    assert not list_installed(log.paths)[0].is_usable
    assert log.pull(tiny_gguf).is_usable
    assert [folder.name for folder in log.paths.models_dir.iterdir()] == ["tiny"]


def test_a_wrong_hash_leads_to_the_next_source_and_both_are_named(
    log: PullLog, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forged = write_gguf(tmp_path / "forged.gguf", num_weights=4095)
    plan_of(monkeypatch, forged, tiny_gguf, sha=sha256(tiny_gguf))
    assert log.pull("tiny").source == f"file:{tiny_gguf}"
    assert f"file:{forged} failed: wrong file forged.gguf: its SHA-256 is {sha256(forged)}" in log.messages
    assert sha256(tiny_gguf) in log.messages
    assert forged.exists(), "a person's own file is never deleted"


def test_when_all_sources_fail_each_is_named_with_its_reason(
    log: PullLog, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_of(monkeypatch, tmp_path / "absent.gguf", tiny_gguf, sha="0" * 64)
    with pytest.raises(UserError) as failure:
        log.pull("tiny")
    assert "any of its sources" in failure.value.message
    first, second = failure.value.hint.splitlines()
    assert "absent.gguf does not exist" in first
    assert "wrong file" in second
    assert "0" * 64 in second
    assert list_installed(log.paths) == []


def test_no_space_is_said_with_both_numbers_before_anything_is_written(
    log: PullLog, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=12_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(UserError) as failure:
        log.pull(tiny_gguf)
    assert "80.0 MB are needed, 12.0 MB are free" in failure.value.message
    assert "for the installed model" in failure.value.hint
    assert list(log.paths.models_dir.iterdir()) == []


def test_a_catalogue_model_without_space_is_refused_before_the_download(
    log: PullLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=150_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(pull_module, "fetch", lambda *_: pytest.fail("nothing may be fetched"))
    with pytest.raises(UserError, match=r"98\.4 MB for the download, 116\.3 MB for the installed model"):
        log.pull("smollm2-135m")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: b"GGML" + data[4:], "not a GGUF file"),
        (lambda data: data[:4000], "damaged"),
        (lambda data: b"", "0 bytes only"),
    ],
)
def test_a_broken_gguf_is_refused_and_nothing_stays(log: PullLog, tiny_gguf: Path, damage: object, says: str) -> None:
    tiny_gguf.write_bytes(damage(tiny_gguf.read_bytes()))  # type: ignore[operator]
    with pytest.raises(UserError, match=says):
        log.pull(tiny_gguf)
    assert list(log.paths.models_dir.iterdir()) == []


def test_cancelling_during_the_import_leaves_nothing(log: PullLog, tiny_gguf: Path) -> None:
    with pytest.raises(PullCancelled):
        log.pull(tiny_gguf, is_cancelled=lambda: log.reports[-1].stage == "import" and log.reports[-1].done_bytes > 0)
    assert list(log.paths.models_dir.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_clear_message(
    log: PullLog, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(log.paths.models_dir / "x"))

    monkeypatch.setattr("chatkv.app.hub.install._seal", refuse)
    with pytest.raises(UserError, match="No permission to write"):
        log.pull(tiny_gguf)
    assert list(log.paths.models_dir.iterdir()) == []


def test_an_unknown_name_suggests_near_ones() -> None:
    with pytest.raises(UserError, match="Did you mean smollm2-135m"):
        plan_pull("smollm2-135")
    with pytest.raises(UserError, match=r"The catalogue has smollm2-135m, "):
        plan_pull("zzzzzz")


@pytest.mark.parametrize("name", ["../up", ".hidden", "a/b", "", "x" * 97, "a b"])
def test_a_name_that_is_no_folder_name_is_refused(log: PullLog, tiny_gguf: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"cannot be a model's name|not a hub source"):
        log.pull(tiny_gguf, name=name) if name else plan_pull("hf:", name)
    assert list(log.paths.models_dir.iterdir()) == []


def test_removed_models_are_gone_and_unknown_ones_named(log: PullLog, tiny_gguf: Path) -> None:
    log.pull(tiny_gguf)
    remove(log.paths, "tiny")
    assert list(log.paths.models_dir.iterdir()) == []
    with pytest.raises(UserError, match="'tiny' is not installed"):
        remove(log.paths, "tiny")
