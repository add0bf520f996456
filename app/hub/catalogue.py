"""The catalogue of known models (`assets/models.toml`). Imports neither torch nor the engine."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType

from ..errors import UserError
from .specs import SourceSpec, parse_source

_KEYS = frozenset(
    {
        "description",
        "sources",
        "licence",
        "download_bytes",
        "context_tokens",
        "num_params",
        "sha256",
        "verified",
        "sampling",
    }
)


@dataclass(frozen=True)
class CatalogueEntry:
    name: str
    description: str
    sources: tuple[str, ...]
    """Where the one weights file can be had, in the order in which to try."""
    licence: str
    download_bytes: int
    """Size of the weights file."""
    context_tokens: int
    num_params: int
    sha256: str | None
    """Hash of the weights file, whatever the source; None: the hub's own hash is all there is."""
    is_verified: bool
    """Whether this project computed the hash from the file itself."""
    sampling: Mapping[str, float]
    """What works best for chats where the weights' makers say nothing; goes into generation_config.json."""

    @property
    def specs(self) -> tuple[SourceSpec, ...]:
        return tuple(parse_source(source) for source in self.sources)


@cache
def catalogue() -> dict[str, CatalogueEntry]:
    """Every entry by name, in the order of the file."""
    text = resources.files("chatkv.assets").joinpath("models.toml").read_text("utf-8")
    return {name: _entry(name, table) for name, table in tomllib.loads(text)["models"].items()}


def find_entry(name: str) -> CatalogueEntry:
    """The entry called `name`.

    Raises:
        UserError: there is none; names the nearest ones.
    """
    entries = catalogue()
    if name in entries:
        return entries[name]
    near = difflib.get_close_matches(name.lower(), entries, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"The catalogue has {', '.join(entries)}."
    raise UserError(
        f"There is no model called '{name}'.",
        f"{hint} A source works too: hf:OWNER/REPO/FILE.gguf, pypi:PACKAGE==VERSION, file:PATH.",
    )


def _entry(name: str, table: dict[str, object]) -> CatalogueEntry:
    assert set(table) <= _KEYS, f"unknown keys in models.toml, {name}: {set(table) - _KEYS}"
    sources, sha256 = table["sources"], table.get("sha256")
    assert isinstance(sources, list)
    assert sha256 is None or isinstance(sha256, str)
    sampling = table.get("sampling", {})
    assert isinstance(sampling, dict)
    return CatalogueEntry(
        name=name,
        description=str(table["description"]),
        sources=tuple(sources),
        licence=str(table["licence"]),
        download_bytes=_int(table["download_bytes"]),
        context_tokens=_int(table["context_tokens"]),
        num_params=_int(table["num_params"]),
        sha256=sha256,
        is_verified=table["verified"] is True,
        sampling=MappingProxyType({key: float(value) for key, value in sampling.items()}),
    )


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value
