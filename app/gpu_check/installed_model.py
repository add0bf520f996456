"""A real model for the check, where one is at hand."""

from __future__ import annotations

from pathlib import Path

CARRIED = Path(__file__).resolve().parents[2] / "build" / "gpu-model"
"""In a checkout on a machine without network: an imported model's folder."""


def installed_model(folder: Path | None) -> Path | None:
    """`folder` itself; else one that was carried along; else the installed default model; else None."""
    if folder is not None:
        return folder
    if (CARRIED / "model.safetensors").exists():
        return CARRIED
    try:
        from chatkv.app.paths import Paths
        from chatkv.app.settings import DEFAULT_MODEL
    except ImportError:  # A checkout whose libraries are not installed.
        return None
    installed = Paths.from_env().models_dir / DEFAULT_MODEL
    return installed if (installed / "model.safetensors").exists() else None
