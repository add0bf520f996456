"""Models as the socket shows them."""

from __future__ import annotations

import os
from datetime import datetime
from typing import Any

from chatkv.app.hub.catalogue import CatalogueEntry, catalogue
from chatkv.app.hub.installed import InstalledModel
from chatkv.app.settings import Settings

from .loaded import LoadedModel


def openai_model(model: InstalledModel, loaded: LoadedModel | None, settings: Settings) -> dict[str, Any]:
    """One entry of `/v1/models`. No `meta`: it makes llama.vscode ask for /props."""
    context = loaded.context_tokens if loaded and loaded.name == model.name else effective_context(model, settings)
    return {
        "id": model.name,
        "object": "model",
        "created": _unix_time(model.created_at),
        "owned_by": "chatkv",
        "max_model_len": context,
        "context_length": context,
    }


def effective_context(model: InstalledModel, settings: Settings) -> int:
    return min(settings.context_tokens, model.context_tokens or settings.context_tokens)


def app_model(
    name: str, installed: InstalledModel | None, current_name: str | None, job_id: str | None
) -> dict[str, Any]:
    """One line of the model picker: a catalogue entry, an installed model, or both."""
    entry = catalogue().get(name)
    shown: dict[str, Any] = {
        "name": name,
        "installed": installed is not None,
        "loaded": name == current_name,
        "size_bytes": installed.size_bytes if installed else None,
        "download_bytes": entry.download_bytes if entry else None,
        "licence": (installed.licence if installed else "") or (entry.licence if entry else ""),
        "context_tokens": (installed.context_tokens if installed else 0) or (entry.context_tokens if entry else 0),
        "description": entry.description if entry else (installed.source if installed else ""),
        "problem": installed.problem if installed else "",
        "fits": _fits(installed, entry),
    }
    return shown | ({"job_id": job_id} if job_id else {})


def _fits(installed: InstalledModel | None, entry: CatalogueEntry | None) -> bool:
    """Whether the weights leave room in memory: as they lie on disk where native kernels read them, else as floats."""
    num_params = (installed.num_params if installed else 0) or (entry.num_params if entry else 0)
    packed_bytes = (installed.size_bytes if installed else 0) or (entry.download_bytes if entry else 0)
    is_quantised = packed_bytes < num_params * 2
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (packed_bytes if is_quantised else num_params * 4) < total_bytes * 0.75


def _unix_time(stamp: str) -> int:
    try:
        return int(datetime.fromisoformat(stamp).timestamp())
    except ValueError:
        return 0
