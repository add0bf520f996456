"""The installed models: folders of `models_dir` that hold a manifest. Imports neither torch nor the engine."""

from __future__ import annotations

import difflib
import json
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..paths import Paths
from .specs import checked_name

MANIFEST = "chatkv.json"
FORMAT_VERSION = 1
INSTALLING_PREFIX = ".installing-"
REMOVING_PREFIX = ".removing-"


@dataclass(frozen=True)
class InstalledModel:
    """A folder in the native format, as its manifest describes it."""

    name: str
    path: Path
    source: str
    licence: str
    content_sha256: str
    """Hash of the tensors: equal weights have equal hashes wherever they came from."""
    weight_format: str
    num_params: int
    size_bytes: int
    """All files of the folder together."""
    context_tokens: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    created_at: str
    has_own_template: bool = True
    """False: the model came without a chat template and uses the plain one of this project."""
    problem: str = ""
    """Why it cannot be used; empty when it can."""

    @property
    def is_usable(self) -> bool:
        return not self.problem


def list_installed(paths: Paths) -> list[InstalledModel]:
    """Every installed model by name; a damaged one is listed with its `problem`. Never raises for one bad folder."""
    try:
        folders = sorted(child for child in paths.models_dir.iterdir() if child.is_dir())
    except OSError:
        return []
    return [_read(folder) for folder in folders if not folder.name.startswith(".")]


def get_installed(paths: Paths, name: str) -> InstalledModel:
    """The usable model called `name`.

    Raises:
        UserError: it is not installed, or its folder is damaged; says what to do.
    """
    model = find_installed(paths, name)
    if model is None:
        near = difflib.get_close_matches(name, [other.name for other in list_installed(paths)], n=3, cutoff=0.5)
        also = f" Installed and similar: {', '.join(near)}." if near else ""
        raise UserError(f"The model '{name}' is not installed.", f"Get it with: chatkv pull {name}.{also}")
    if model.problem:
        raise UserError(
            f"The model '{name}' is damaged: {model.problem}.",
            f"Remove it and get it again: chatkv rm {name} && chatkv pull {name}",
        )
    return model


def find_installed(paths: Paths, name: str) -> InstalledModel | None:
    """The model called `name`, usable or damaged; None when there is no such folder."""
    folder = paths.models_dir / checked_name(name)
    return _read(folder) if folder.is_dir() else None


def remove(paths: Paths, name: str) -> None:
    """Delete a model. It is renamed first, so that a kill leaves nothing half usable; a sweep finishes the rest.

    Raises:
        UserError: it is not installed, or the folder cannot be deleted.
    """
    if find_installed(paths, name) is None:
        get_installed(paths, name)  # raises, with the near names
    try:
        shutil.rmtree(set_aside(paths.models_dir / name))
    except OSError as error:
        raise UserError(
            f"Cannot remove the model '{name}': {error.strerror or error}.",
            f"Check who may write to {paths.models_dir}.",
        ) from error


def set_aside(folder: Path) -> Path:
    """Rename a model's folder to a name that nobody uses and every sweep deletes."""
    aside = folder.with_name(f"{REMOVING_PREFIX}{folder.name}-{secrets.token_hex(4)}")
    folder.rename(aside)
    return aside


def _read(folder: Path) -> InstalledModel:
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        model = _from_manifest(folder, manifest)
        problem = _missing_or_changed(folder, manifest["files"])
    except FileNotFoundError:
        return _broken(folder, f"it has no {MANIFEST}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return _broken(folder, f"its {MANIFEST} cannot be read ({type(error).__name__}: {error})")
    return _broken(folder, problem) if problem else model


def _from_manifest(folder: Path, manifest: dict[str, Any]) -> InstalledModel:
    version = manifest["format_version"]
    if version != FORMAT_VERSION:
        raise ValueError(f"format {version} was written by another version of chatkv, which reads {FORMAT_VERSION}")
    bos = manifest["bos_token_id"]
    return InstalledModel(
        name=folder.name,
        path=folder,
        source=str(manifest["source"]),
        licence=str(manifest["licence"]),
        content_sha256=str(manifest["content_sha256"]),
        weight_format=str(manifest["weight_format"]),
        num_params=int(manifest["num_params"]),
        size_bytes=int(manifest["size_bytes"]),
        context_tokens=int(manifest["context_tokens"]),
        eos_token_ids=tuple(int(token_id) for token_id in manifest["eos_token_ids"]),
        bos_token_id=None if bos is None else int(bos),
        created_at=str(manifest["created_at"]),
        has_own_template=bool(manifest.get("has_own_template", True)),
    )


def _missing_or_changed(folder: Path, files: dict[str, dict[str, Any]]) -> str:
    """What is wrong with the files that the manifest names, by size only: hashing gigabytes is no way to list."""
    for name, facts in files.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != int(facts["size"]):
            return f"{name} has {file.stat().st_size} bytes instead of {facts['size']}"
    return ""


def _broken(folder: Path, problem: str) -> InstalledModel:
    return InstalledModel(
        name=folder.name,
        path=folder,
        source="",
        licence="",
        content_sha256="",
        weight_format="",
        num_params=0,
        size_bytes=_size_bytes(folder),
        context_tokens=0,
        eos_token_ids=(),
        bos_token_id=None,
        created_at="",
        problem=problem,
    )


def _size_bytes(folder: Path) -> int:
    try:
        return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    except OSError:
        return 0
