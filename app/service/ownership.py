"""One service per home: the lock, and the sockets that only its holder may replace."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import struct
import time
from pathlib import Path
from typing import Any

from chatkv.app.errors import UserError
from chatkv.app.paths import make_private_dir

BACKLOG = 128
_UCRED = struct.Struct("3i")
_POLL_S = 0.05


class ServiceLock:
    """An flock on a file in the state directory. The kernel frees it when the process dies, however it dies.

    The descriptor is close-on-exec, so no child process can hold the lock on.
    """

    def __init__(self, file: Path):
        self.file = file
        self._fd: int | None = None

    @property
    def is_held(self) -> bool:
        return self._fd is not None

    def try_acquire(self) -> bool:
        """
        Raises:
            UserError: the file cannot be made.
        """
        try:
            fd = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UserError(
                f"Cannot write {self.file}: {error.strerror}.",
                "Mend the folder's permissions, free some disk space, or set CHATKV_HOME to another folder.",
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._fd = fd
        self.write_owner({"pid": os.getpid()})
        return True

    def is_free(self) -> bool:
        """Whether nobody holds it at this moment."""
        fd = os.open(self.file, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        return True

    def acquire_or_attach(self, socket_path: Path, timeout_s: float) -> bool:
        """True: the lock is ours. False: a live service answers on `socket_path`.

        A holder that neither answers nor lets go is starting or exiting: wait for either.

        Raises:
            UserError: it did neither within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while not self.try_acquire():
            if can_connect(socket_path):
                return False
            if time.monotonic() > deadline:
                pid = self.owner().get("pid", "unknown")
                raise UserError(
                    f"Another chatkv service (pid {pid}) holds {self.file}, but does not answer.",
                    f"If it hangs, end it with: kill {pid}",
                )
            time.sleep(_POLL_S)
        return True

    def write_owner(self, owner: dict[str, Any]) -> None:
        """Say in the file who holds the lock (for people and messages; the lock itself is the truth)."""
        assert self._fd is not None, "the lock is not held"
        with contextlib.suppress(OSError):  # A full disk is no reason not to serve.
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(owner).encode(), 0)

    def owner(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self.file.read_text()))
        except (OSError, ValueError):
            return {}

    def release(self) -> None:
        if self._fd is not None:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = None


class PeerCheckedSocket(socket.socket):
    """A listening unix socket that takes connections of its own user and of root only."""

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        if peer_uid(connection) in (os.getuid(), 0):
            return connection, address
        connection.close()
        # asyncio's accept loop takes this as a connection that went away by itself.
        raise ConnectionAbortedError(errno.ECONNABORTED, "the peer belongs to another user")


def peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(credentials)[1])


def can_connect(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def bind_unix(path: Path, lock: ServiceLock) -> PeerCheckedSocket:
    """Listen on `path`, mode 0600 in a 0700 directory. A stale socket is unlinked, only while the lock is held.

    Raises:
        UserError: something that is not our stale socket is in the way.
    """
    assert lock.is_held, "only the holder of the service lock may touch the socket"
    make_private_dir(path.parent)
    _remove_stale(path)
    listener = PeerCheckedSocket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    old_umask = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise UserError(f"Cannot make the socket {path}: {error.strerror}.", "Set CHATKV_HOME elsewhere.") from error
    finally:
        os.umask(old_umask)
    listener.listen(BACKLOG)
    return listener


def unlink_socket(path: Path, lock: ServiceLock) -> None:
    assert lock.is_held, "only the holder of the service lock may touch the socket"
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def bind_tcp(host: str, port: int) -> socket.socket:
    """Listen on a loopback address.

    Raises:
        UserError: the port is taken or not allowed.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setblocking(False)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise UserError(
            f"Cannot listen on {host}:{port}: {error.strerror}.",
            "Stop the program that uses the port, or set another one (setting `port`, or CHATKV_PORT).",
        ) from error
    return listener


def _remove_stale(path: Path) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.getuid():
        raise UserError(f"{path} is in the way: it is not chatkv's socket.", "Move it away.")
    if can_connect(path):
        raise UserError(f"Another program listens on {path}.", "Stop it, or set CHATKV_HOME to another folder.")
    path.unlink()
