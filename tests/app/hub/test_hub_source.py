from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from chatkv.app.errors import UserError
from chatkv.app.hub import hub_stream, sources
from chatkv.app.hub import pull as pull_module
from chatkv.app.hub.pull import PullPlan
from chatkv.app.hub.reports import PullCancelled
from chatkv.app.hub.specs import FileSpec, parse_source
from tests.app.hub.hub_server import COMMIT, FakeHub
from tests.app.hub.makers import PullLog, sha256

SPEC = "hf:owner/repo/tiny.gguf"


@pytest.fixture
def hub(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf-cache"))
    monkeypatch.setattr(hub_stream, "_RETRY_PAUSE_S", 0.0)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with FakeHub({"owner/repo/tiny.gguf": tiny_gguf.read_bytes()}) as hub:
        use_endpoint(monkeypatch, hub.url)
        yield hub


def plan_of(monkeypatch: pytest.MonkeyPatch, *specs: object, sha: str | None = None) -> None:
    plan = PullPlan("tiny", specs, "MIT", sha, 0)  # type: ignore[arg-type]
    monkeypatch.setattr(pull_module, "plan_pull", lambda *_: plan)


def use_endpoint(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """What HF_ENDPOINT does; huggingface-hub reads it once, when it is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def downloads(log: PullLog) -> list[Path]:
    return [file for file in log.paths.downloads_dir.rglob("*") if file.is_file()]


def test_a_file_comes_from_the_hub_and_the_download_is_tidied_up(hub: FakeHub, log: PullLog) -> None:
    assert log.pull(SPEC).source == SPEC
    assert hub.ranges == [None]
    assert log.stages == ["resolve", "download", "verify", "import", "done"]
    assert downloads(log) == []


def test_a_broken_download_goes_on_where_it_stopped(hub: FakeHub, log: PullLog, tiny_gguf: Path) -> None:
    hub.break_after_bytes = 6000
    log.pull(SPEC)
    size = tiny_gguf.stat().st_size
    assert hub.ranges == [None, *[f"bytes={start}-" for start in range(6000, size, 6000)]]


def test_a_stopped_pull_keeps_its_bytes_and_the_next_process_uses_them(
    hub: FakeHub, log: PullLog, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_stream, "_REPORT_BYTES", 1)
    hub.break_after_bytes = 6000
    with pytest.raises(PullCancelled):
        log.pull(SPEC, is_cancelled=lambda: log.reports[-1].done_bytes >= 5000)
    (part,) = downloads(log)
    assert part.suffix == ".part"
    assert part.read_bytes() == tiny_gguf.read_bytes()[: part.stat().st_size]
    hub.break_after_bytes = None
    log.pull(SPEC)
    assert hub.ranges == [None, "bytes=6000-"]


def test_a_server_without_ranges_is_read_from_the_beginning(hub: FakeHub, log: PullLog) -> None:
    hub.break_after_bytes = 6000
    hub.ignores_ranges = True
    with pytest.raises(UserError, match=r"the connection broke after 6\.0 kB"):
        log.pull(SPEC)
    hub.break_after_bytes = None
    assert log.pull(SPEC).is_usable


def test_the_hub_s_own_hash_is_checked_when_the_catalogue_has_none(
    hub: FakeHub, log: PullLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = hub_stream.stream_file

    def spoil(*args: object, **options: object) -> Path:
        file = real(*args, **options)  # type: ignore[arg-type]
        file.write_bytes(b"x" + file.read_bytes()[1:])
        return file

    monkeypatch.setattr("chatkv.app.hub.hub_source.stream_file", spoil)
    with pytest.raises(UserError, match=r"wrong file tiny\.gguf"):
        log.pull(SPEC)
    assert downloads(log) == [], "a wrong file is no base for another try"


def test_a_wrong_file_on_the_hub_leads_to_the_next_source(
    hub: FakeHub, log: PullLog, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files["owner/repo/tiny.gguf"] = tiny_gguf.read_bytes() + b"!"
    plan_of(monkeypatch, parse_source(SPEC), FileSpec(tiny_gguf), sha=sha256(tiny_gguf))
    assert log.pull("tiny").source == f"file:{tiny_gguf}"
    assert f"{SPEC} failed: wrong file tiny.gguf" in log.messages


def test_unusable_weights_are_not_kept_to_be_refused_again(hub: FakeHub, log: PullLog, tiny_gguf: Path) -> None:
    hub.files["owner/repo/tiny.gguf"] = tiny_gguf.read_bytes()[:4000]
    with pytest.raises(UserError, match="damaged"):
        log.pull(SPEC)
    assert downloads(log) == []
    hub.files["owner/repo/tiny.gguf"] = tiny_gguf.read_bytes()
    assert log.pull(SPEC).is_usable


def test_a_token_is_sent_and_its_absence_explained(hub: FakeHub, log: PullLog, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.needs_token = "hf_secret"
    with pytest.raises(UserError, match="no repository owner/repo, or it is private"):
        log.pull(SPEC)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert log.pull(SPEC).is_usable


@pytest.mark.parametrize(
    ("spec", "status", "code", "says"),
    [
        ("hf:owner/repo/other.gguf", None, "", "has no file other.gguf"),
        (SPEC, 404, "RevisionNotFound", "has no revision main"),
        (SPEC, 403, "GatedRepo", "accept its terms"),
        (SPEC, 500, "", "answered with status 500"),
    ],
)
def test_what_the_hub_refuses_is_said_plainly(
    hub: FakeHub, log: PullLog, spec: str, status: int | None, code: str, says: str
) -> None:
    hub.status, hub.error_code = status, code
    with pytest.raises(UserError, match=says):
        log.pull(spec)


def test_a_repository_is_fetched_as_a_directory(hub: FakeHub, log: PullLog, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors", "README.md", "consolidated.safetensors"):
        hub.files[f"owner/dir/{name}"] = name.encode()
    fetched: dict[str, bytes] = {}

    def look(paths: object, name: str, weights: Path, *_: object) -> object:
        fetched.update({file.name: file.read_bytes() for file in weights.iterdir()})
        raise UserError("seen")

    monkeypatch.setattr(pull_module, "install", look)
    with pytest.raises(UserError, match="seen"):
        log.pull("hf:owner/dir")
    assert fetched == {name: name.encode() for name in ("config.json", "tokenizer.json", "model.safetensors")}


def test_a_repository_of_ggufs_only_asks_for_one_of_them(hub: FakeHub, log: PullLog) -> None:
    with pytest.raises(UserError, match=r"has no safetensors; it has tiny\.gguf"):
        log.pull("hf:owner/repo")


def test_a_file_in_the_shared_cache_is_not_fetched_again(hub: FakeHub, log: PullLog, tiny_gguf: Path) -> None:
    snapshot = Path(constants.HF_HUB_CACHE) / "models--owner--repo" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "tiny.gguf").write_bytes(tiny_gguf.read_bytes())
    assert log.pull(f"{SPEC}@{COMMIT}").is_usable
    assert hub.requests == []
    assert (snapshot / "tiny.gguf").exists()


def test_offline_mode_is_honoured(hub: FakeHub, log: PullLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        log.pull(SPEC)
    assert hub.requests == []


def test_a_refused_connection_leads_to_the_next_source_at_once(
    log: PullLog, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as reserved:  # bound, not listening: nobody answers here
        reserved.bind(("127.0.0.1", 0))
        use_endpoint(monkeypatch, f"http://127.0.0.1:{reserved.getsockname()[1]}")
        plan_of(monkeypatch, parse_source(SPEC), FileSpec(tiny_gguf))
        assert log.pull("tiny").source == f"file:{tiny_gguf}"
    assert "cannot be reached" in log.messages


@pytest.mark.parametrize("fault", ["metadata", "bytes"])
def test_a_silent_hub_leads_to_the_next_source_within_five_seconds(
    hub: FakeHub, log: PullLog, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    assert sources.REACH_TIMEOUT_S < 4.0, "five seconds, less what starting the next source takes"
    monkeypatch.setattr(pull_module, "REACH_TIMEOUT_S", 0.3)
    plan_of(monkeypatch, parse_source(SPEC), FileSpec(tiny_gguf))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        if fault == "metadata":
            use_endpoint(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        hub.stalls = True
        started = time.monotonic()
        assert log.pull("tiny").source == f"file:{tiny_gguf}"
    assert time.monotonic() - started < 3.0
    assert f"{SPEC} failed" in log.messages


def test_a_changed_file_on_the_hub_does_not_continue_the_old_bytes(
    hub: FakeHub, log: PullLog, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.ignores_ranges = True
    monkeypatch.setattr(hub_stream, "_MAX_RETRIES", 0)
    hub.break_after_bytes = 6000
    with pytest.raises(UserError, match="connection broke"):
        log.pull(SPEC)
    hub.break_after_bytes, hub.ignores_ranges = None, False
    hub.files["owner/repo/tiny.gguf"] = tiny_gguf.read_bytes()[:-1] + b"\x01"
    log.pull(SPEC)
    assert hub.ranges[-1] is None
