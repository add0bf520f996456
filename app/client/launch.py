"""Starting the service on demand, once, however many clients want it at the same moment."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from ..errors import UserError
from ..paths import Paths
from ..service.ownership import ServiceLock, can_connect

COMMAND = (sys.executable, "-m", "chatkv.app.service", "--detached")
START_TIMEOUT_S = 60.0
_POLL_S = 0.02


async def ensure_running(paths: Paths, command: Sequence[str] = COMMAND, timeout_s: float = START_TIMEOUT_S) -> bool:
    """Return once a service accepts connections. True: this call started it.

    One client at a time may start a service; the others wait for its socket. A service that is just exiting is waited
    for: the new one takes over its lock.

    Raises:
        UserError: it could not be started; carries what it said.
    """
    if can_connect(paths.socket_path):
        return False
    paths.make_private()
    deadline = time.monotonic() + timeout_s
    turn = ServiceLock(paths.state_dir / "start.lock")
    while not turn.try_acquire():
        if can_connect(paths.socket_path):
            return False
        await _pause(deadline, paths)
    try:
        if can_connect(paths.socket_path):
            return False
        await _launch(paths, command, deadline)
        return True
    finally:
        turn.release()


async def wait_stopped(paths: Paths, timeout_s: float = 20.0) -> bool:
    """Wait until no service holds this home; False when one still does after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    lock = ServiceLock(paths.service_lock)
    while paths.service_lock.exists() and not lock.is_free():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True


async def _launch(paths: Paths, command: Sequence[str], deadline: float) -> None:
    with tempfile.TemporaryFile() as output:
        process = _spawn(command, output)
        while not can_connect(paths.socket_path):
            if process.poll() is not None:
                output.seek(0)
                lines = _reason(output.read().decode("utf-8", "replace"), process.returncode)
                raise UserError("The chatkv service did not start.", "\n".join([*lines, f"Its log: {paths.log_file}"]))
            await _pause(deadline, paths)
    # Reaped when it ends, so that a long-lived client keeps no zombie.
    threading.Thread(target=process.wait, daemon=True).start()


def _reason(said: str, status: int) -> list[str]:
    """The end of what a service said before it ended; of a trace only what stands below its frames."""
    lines = said.strip().splitlines() or [f"It ended with status {status}."]
    if "Traceback (most recent call last):" in lines:
        while any(line.startswith("  ") for line in lines):
            del lines[0]
    return lines[-5:]


def _spawn(command: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Detached: another session, no terminal, no folder of the caller, no descriptor but its own output."""
    environment = dict(os.environ)
    if home := environment.get("CHATKV_HOME"):
        environment["CHATKV_HOME"] = str(Path(home).expanduser().absolute())
    try:
        return subprocess.Popen(
            command,
            env=environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            close_fds=True,
            start_new_session=True,
        )
    except OSError as error:
        raise UserError(f"Cannot start the chatkv service: {error.strerror}.", " ".join(command)) from error


async def _pause(deadline: float, paths: Paths) -> None:
    if time.monotonic() > deadline:
        raise UserError("The chatkv service did not start in time.", f"Its log: {paths.log_file}")
    await asyncio.sleep(_POLL_S)
