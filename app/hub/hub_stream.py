"""Streams one file to disk and goes on where an earlier try, or an earlier process, was cut off."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from .deadline import within
from .reports import PullCancelled, SourceFailed, human_bytes

if TYPE_CHECKING:
    from .hub_source import RemoteFile
    from .sources import FetchJob

_REPORT_BYTES = 1 << 18
_MAX_RETRIES = 5
"""In a row without a new byte, when no other source is left."""
_MAX_RETRIES_BEFORE_NEXT = 2
"""The same while there is another source, if this one has sent anything at all; else it gets no second chance."""
_RETRY_PAUSE_S = 1.0


def stream_file(remote: RemoteFile, job: FetchJob, *, already: int = 0, total: int = 0) -> Path:
    """Download `remote` into the job's folder and return its place.

    The partial file carries the start of the ETag in its name: bytes of another version are never continued.

    Raises:
        SourceFailed: the connection broke and stayed broken; the partial file is kept.
        HfHubHTTPError: the hub refused.
        PullCancelled: the person stopped it; the partial file is kept.
    """
    target = job.folder / remote.name
    if target.is_file() and (not remote.size or target.stat().st_size == remote.size):
        job.on_bytes(already + remote.size, total or remote.size)
        return target
    part = job.folder / f"{remote.name}.{remote.etag[:12]}.part"
    num_retries, has_arrived = 0, False
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            _continue(part, remote, job, already, total or remote.size)
            break
        except HTTPError as error:
            if getattr(error, "response", None) is not None:
                raise  # an answer, not a broken connection
            now = part.stat().st_size if part.exists() else 0
            has_arrived = has_arrived or now > before
            num_retries = 0 if now > before else num_retries + 1
            patience = _MAX_RETRIES if job.is_last else _MAX_RETRIES_BEFORE_NEXT if has_arrived else 0
            if num_retries > patience:
                why = str(error) or type(error).__name__
                raise SourceFailed(f"the connection broke after {human_bytes(now)} ({why}); they are kept") from error
            _pause(job)
    part.rename(target)
    return target


def _continue(part: Path, remote: RemoteFile, job: FetchJob, already: int, total: int) -> None:
    start = part.stat().st_size if part.exists() else 0
    if remote.size and start > remote.size:
        part.unlink()
        start = 0
    if remote.size and start == remote.size:
        return
    headers = build_hf_headers(headers={"Accept-Encoding": "identity"})
    if start:
        headers["Range"] = f"bytes={start}-"
    silence_s = constants.HF_HUB_DOWNLOAD_TIMEOUT if job.is_last else job.reach_timeout_s
    response = within(
        job.reach_timeout_s, lambda: _open(remote.url, headers, silence_s), job.is_cancelled, "the hub's storage"
    )
    try:
        hf_raise_for_status(response)
        if response.status_code != 206:
            start = 0  # the server does not continue files: from the beginning
        with part.open("ab") as file:
            file.truncate(start)
            done = reported = start
            for chunk in response.iter_bytes():  # as they come: a chunk size would drop what a break leaves unfilled
                if job.is_cancelled():
                    raise PullCancelled
                file.write(chunk)
                done += len(chunk)
                if done - reported >= _REPORT_BYTES or done == remote.size:
                    reported = done
                    job.on_bytes(already + done, total)
    finally:
        response.close()
    if remote.size and done != remote.size:
        part.unlink()
        raise SourceFailed(f"{remote.name} has {done} bytes instead of {remote.size}; they were deleted")


def _open(url: str, headers: dict[str, str], silence_s: float) -> Any:
    """The answer's head; its body may pause for `silence_s` at most."""
    session = huggingface_hub.get_session()
    request = session.build_request("GET", url, headers=headers, timeout=silence_s)
    return session.send(request, stream=True)


def _pause(job: FetchJob) -> None:
    """Wait a moment before the next try, but not when the person has stopped the pull."""
    waited = threading.Event()
    for _ in range(10):
        if job.is_cancelled():
            raise PullCancelled
        waited.wait(_RETRY_PAUSE_S / 10)
