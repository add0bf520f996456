from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from chatkv.app import paths as paths_module
from chatkv.app.errors import UserError
from chatkv.app.paths import MAX_SOCKET_PATH_BYTES, Paths, make_private_dir

KINDS = ("CONFIG_HOME", "DATA_HOME", "CACHE_HOME", "STATE_HOME", "RUNTIME_DIR")


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS:
        monkeypatch.delenv(f"XDG_{kind}", raising=False)
    monkeypatch.delenv("CHATKV_HOME", raising=False)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_one_folder_holds_everything_of_a_home(home: Path) -> None:
    paths = Paths.from_env()
    names = ("settings_file", "models_dir", "chats_db", "downloads_dir", "kv_dir", "service_lock", "key_file")
    assert all(getattr(paths, name).is_relative_to(home) for name in (*names, "store_key_file", "log_file"))


def test_two_homes_share_nothing(tmp_path: Path) -> None:
    one, other = Paths.under(tmp_path / "one"), Paths.under(tmp_path / "other")
    assert one.socket_path != other.socket_path
    assert one.service_lock != other.service_lock


def test_a_relative_home_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CHATKV_HOME", "here")
    assert Paths.from_env().data_dir == tmp_path / "here" / "data"


def test_state_folders_follow_the_platform(no_home: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = Paths.from_env()
    assert paths.config_dir == tmp_path / ".config" / "chatkv"
    assert paths.models_dir == tmp_path / ".local" / "share" / "chatkv" / "models"
    assert paths.log_file == tmp_path / ".local" / "state" / "chatkv" / "service.log"


@pytest.mark.parametrize("long", [False, True])
def test_the_socket_is_the_same_from_every_session(
    no_home: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, long: bool
) -> None:
    """A service that a desktop session started must be found from cron, `su` or a container, and outlive it."""
    monkeypatch.setenv("HOME", str(tmp_path / ("x" * 120 if long else "h")))
    plain = Paths.from_env().socket_path
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "session"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    assert Paths.from_env().socket_path == plain


def test_without_a_home_directory_it_says_so(no_home: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # As for a user who is in no passwd file.
    with pytest.raises(UserError, match="Set HOME, or CHATKV_HOME"):
        Paths.from_env()


def test_a_long_home_gets_a_short_socket_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths_module, "SHORT_SOCKETS_DIR", tmp_path)
    one, other = (Paths.under(tmp_path / ("ü" * 100) / name) for name in ("one", "other"))
    assert one.socket_path != other.socket_path
    assert one.socket_path.parent.parent == tmp_path
    monkeypatch.undo()
    assert len(os.fsencode(Paths.under(tmp_path / ("ü" * 100)).socket_path)) <= MAX_SOCKET_PATH_BYTES


def test_folders_are_closed_to_others_whatever_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths_module, "SHORT_SOCKETS_DIR", tmp_path)
    paths = Paths.under(tmp_path / "home")
    paths.config_dir.mkdir(parents=True, mode=0o755)
    old = os.umask(0)
    try:
        paths.make_private()
    finally:
        os.umask(old)
    folders = (paths.config_dir, paths.data_dir, paths.models_dir, paths.cache_dir, paths.state_dir)
    assert {mode(folder) for folder in (*folders, paths.socket_path.parent)} == {0o700}


def test_a_link_in_place_of_the_short_socket_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/tmp is everybody's: somebody could have put it there first."""
    monkeypatch.setattr(paths_module, "SHORT_SOCKETS_DIR", tmp_path)
    paths = Paths.under(tmp_path / ("x" * 120))
    (tmp_path / "theirs").mkdir()
    paths.socket_path.parent.symlink_to(tmp_path / "theirs")
    with pytest.raises(UserError, match="is not a directory"):
        paths.make_private()


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(UserError, match="belongs to another user"):
        make_private_dir(tmp_path / "folder")


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    with pytest.raises(UserError, match=r"Cannot use the folder .*home/config: Not a directory"):
        Paths.under(tmp_path / "home").make_private()
