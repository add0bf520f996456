"""A program in a pseudo-terminal, its output with times of arrival."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Mapping, Sequence


class Terminal:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str], size: tuple[int, int] = (120, 36)):
        """`size` is (columns, rows)."""
        master, slave = pty.openpty()
        self._master = master
        self._set_size(size)
        self._chunks: list[tuple[float, int]] = []
        """(time, length of the output after the chunk)"""
        self._changed = threading.Condition()
        self.output = bytearray()
        self.started_at = time.perf_counter()
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            close_fds=True,
            env={**environment, "TERM": "xterm-256color", "COLORTERM": "truecolor"},
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def press(self, keys: bytes) -> float:
        """Write keys; the time just before."""
        now = time.perf_counter()
        os.write(self._master, keys)
        return now

    def resize(self, size: tuple[int, int]) -> None:
        self._set_size(size)
        self.process.send_signal(signal.SIGWINCH)

    def wait_for(self, text: bytes, since: int, timeout_s: float = 30.0) -> float:
        """The time at which output from position `since` on held `text`.

        Raises:
            TimeoutError: it never did.
        """
        deadline = time.perf_counter() + timeout_s
        with self._changed:
            while (found := self.output.find(text, since)) < 0:
                if not self._changed.wait(max(0.0, deadline - time.perf_counter())):
                    raise TimeoutError(f"{text!r} never came; the last output is {bytes(self.output[-400:])!r}")
            end = found + len(text)
            return next(at for at, length in self._chunks if length >= end)

    def cpu_s(self) -> float:
        """Processor time of the program so far."""
        with open(f"/proc/{self.process.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def waited_s(self) -> float:
        """Time for which threads of the program could run and no core was free for them."""
        tasks = f"/proc/{self.process.pid}/task"
        waited_ns = 0
        for task in os.listdir(tasks):
            with open(f"{tasks}/{task}/schedstat") as file:
                waited_ns += int(file.read().split()[1])
        return waited_ns / 1e9

    def close(self, keys: bytes, timeout_s: float = 10.0) -> int:
        """Press what quits, and wait; kills what does not end. Its exit status."""
        self.press(keys)
        try:
            return self.process.wait(timeout_s)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            self._reader.join(timeout_s)
            os.close(self._master)

    def _set_size(self, size: tuple[int, int]) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:
                return
            if not data:
                return
            with self._changed:
                self.output += data
                self._chunks.append((time.perf_counter(), len(self.output)))
                self._changed.notify_all()
