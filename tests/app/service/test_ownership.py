"""The lock and the sockets: nobody takes what is in use, children inherit nothing."""

from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from chatkv.app.errors import UserError
from chatkv.app.service.keys import read_or_make_api_key, read_or_make_store_key
from chatkv.app.service.ownership import ServiceLock, bind_tcp, bind_unix, can_connect, peer_uid, unlink_socket


@pytest.fixture
def lock(home: Path) -> ServiceLock:
    lock = ServiceLock(home / "lock")
    assert lock.try_acquire()
    return lock


def test_one_holder_and_its_pid(lock: ServiceLock) -> None:
    other = ServiceLock(lock.file)
    assert not other.try_acquire()
    assert not other.is_free()
    assert other.owner() == {"pid": os.getpid()}
    lock.release()
    assert other.owner() == {}
    assert other.try_acquire()
    other.release()


def test_a_lock_that_cannot_be_made_is_told_with_its_file(home: Path) -> None:
    (home / "taken").mkdir()
    with pytest.raises(UserError, match=r"Cannot write .*/taken: Is a directory"):
        ServiceLock(home / "taken").try_acquire()


def test_a_full_disk_keeps_nobody_from_the_lock(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    lock = ServiceLock(home / "lock")
    assert lock.try_acquire()
    lock.release()


def test_a_child_holds_neither_lock_nor_socket_on(lock: ServiceLock, home: Path) -> None:
    path = home / "run" / "s.sock"
    listener = bind_unix(path, lock)
    code = "import sys; print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        listener.close()
        lock.release()
        assert ServiceLock(lock.file).is_free()
        assert not can_connect(path)


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(lock: ServiceLock, home: Path) -> None:
    path = home / "run" / "s.sock"
    first = bind_unix(path, lock)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with pytest.raises(UserError, match="Another program listens"):
        bind_unix(path, lock)
    first.close()
    second = bind_unix(path, lock)
    assert can_connect(path)
    second.close()
    unlink_socket(path, lock)
    assert not path.exists()


def test_the_umask_of_the_process_is_left_as_it_was(lock: ServiceLock, home: Path) -> None:
    before = os.umask(0o027)
    try:
        bind_unix(home / "run" / "s.sock", lock).close()
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)


def test_the_peers_uid_is_the_kernels(lock: ServiceLock, home: Path) -> None:
    path = home / "run" / "s.sock"
    with bind_unix(path, lock) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.setblocking(True)
        client.connect(str(path))
        connection, _ = listener.accept()
        assert peer_uid(connection) == os.getuid()
        connection.close()


def test_a_taken_port_is_a_clear_error() -> None:
    with bind_tcp("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(UserError, match=str(port)):
            bind_tcp("127.0.0.1", port)


def test_keys_are_made_once_private_and_of_full_length(home: Path) -> None:
    api, store = home / "api.key", home / "store.key"
    key = read_or_make_api_key(api)
    assert read_or_make_api_key(api) == key
    assert len(key) > 40
    secret = read_or_make_store_key(store)
    assert len(secret) == 32
    assert read_or_make_store_key(store) == secret
    for file in (api, store):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    store.write_bytes(b"cut")
    assert len(read_or_make_store_key(store)) == 32
    api.write_bytes(b"\n")
    assert len(read_or_make_api_key(api)) > 40
