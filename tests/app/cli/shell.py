"""The command as a shell runs it, in a pipe and on a terminal, against a service with a scripted engine."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from chatkv.app.paths import Paths
from chatkv.app.service.ownership import can_connect

COMMAND = (sys.executable, "-m", "chatkv.app")
FAKE_SERVICE = (sys.executable, str(Path(__file__).parents[1] / "service" / "fake_engine.py"), "--detached")
TIMEOUT_S = 30.0


class Terminal:
    """One command on a pseudo-terminal of its own, so that Ctrl-C is a key."""

    def __init__(self, command: tuple[str, ...], environment: dict[str, str]):
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, b"\x24\x00\x78\x00\x00\x00\x00\x00")  # 36 x 120
        self.shown = ""
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, text: str) -> None:
        while text not in self.shown:
            assert self._read(), f"it ended without showing {text!r}: {self.shown!r}"

    def ended(self) -> int:
        """The exit code; everything that was shown is in `shown`."""
        while self._read():
            pass
        os.close(self._master)
        return self.process.wait(TIMEOUT_S)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._master], [], [], TIMEOUT_S)
        if not ready:
            self.process.kill()
            raise AssertionError(f"nothing came for {TIMEOUT_S} s; it had shown {self.shown!r}")
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:  # The other side is closed.
            return False
        self.shown += data.decode("utf-8", "replace")
        return bool(data)


class Shell:
    """Runs `chatkv` in one home."""

    def __init__(self, home: Path, **variables: str):
        self.home = home
        self.paths = Paths.under(home)
        self.environment = {**os.environ, "CHATKV_HOME": str(home), "CHATKV_PORT": "0", "TERM": "xterm", **variables}
        self.environment.pop("COLUMNS", None)

    def __call__(self, *arguments: str | bytes, input: bytes | str = b"") -> subprocess.CompletedProcess[str]:
        piped = input.encode() if isinstance(input, str) else input
        done = subprocess.run(
            [*COMMAND, *arguments],
            env=self.environment,
            input=piped,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        out, err = done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
        assert "Traceback" not in err, err
        return subprocess.CompletedProcess(done.args, done.returncode, out, err)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*COMMAND, *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def on_terminal(self, *arguments: str, **variables: str) -> Terminal:
        return Terminal((*COMMAND, *arguments), self.environment | variables)

    def get(self, path: str) -> dict[str, Any]:
        """What the service says, without the command."""
        transport = httpx.HTTPTransport(uds=str(self.paths.socket_path))
        with httpx.Client(transport=transport, base_url="http://chatkv", timeout=TIMEOUT_S) as client:
            return dict(client.get(path).raise_for_status().json())

    @property
    def num_chats(self) -> int:
        return len(self.get("/chatkv/chats?limit=1000")["chats"])

    def newest_chat(self) -> str:
        return str(self.get("/chatkv/chats?limit=1")["chats"][0]["id"])

    def last_message(self) -> dict[str, Any]:
        """Of the newest chat."""
        return dict(self.get(f"/chatkv/chats/{self.newest_chat()}")["messages"][-1])


@contextmanager
def serving(shell: Shell) -> Iterator[subprocess.Popen[bytes]]:
    """A service with a scripted engine in the shell's home."""
    process = subprocess.Popen(FAKE_SERVICE, env=shell.environment, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not can_connect(shell.paths.socket_path):
            assert process.poll() is None, "the service ended"
            assert time.monotonic() < deadline, "the service does not listen"
            select.select([], [], [], 0.01)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(TIMEOUT_S)
