"""What the service tells of itself, its models and its jobs, as records, sanitised as they enter the view."""

from __future__ import annotations

from dataclasses import dataclass, field

from .cache_records import TIERS
from .json_fields import Json, integer, mapping, number, string
from .render.sanitize import sanitize_line


@dataclass(frozen=True)
class ModelState:
    """The model that the service holds, or is loading."""

    name: str = ""
    state: str = "no_model"
    progress: float = 0.0
    error: str = ""
    context_tokens: int = 0
    weight_format: str = ""
    kernels: str = ""
    """Which run it: "native ...", "torch ..." or "Triton ..."."""
    card: str = ""
    """The GPU's name; empty on the CPU."""

    @classmethod
    def from_json(cls, data: Json | None) -> ModelState:
        data = data or {}
        return cls(
            sanitize_line(string(data, "name")),
            string(data, "state") or "no_model",
            number(data, "progress"),
            sanitize_line(string(data, "error")),
            integer(data, "context_tokens"),
            sanitize_line(string(data, "weight_format")),
            sanitize_line(string(data, "kernels")),
            sanitize_line(string(data, "card")),
        )


@dataclass(frozen=True)
class ServiceStatus:
    model: ModelState = field(default_factory=ModelState)
    device: str = ""
    version: str = ""
    num_waiting: int = 0
    batch_size: int = 0
    kv_usage: float = 0.0
    kept_bytes: tuple[int, ...] = ()
    """What each tier of the cache holds."""
    notices: tuple[str, ...] = ()
    """What went wrong and can be lived with: a mended chat file, a store that is memory only, a full disk."""

    @classmethod
    def from_json(cls, data: Json) -> ServiceStatus:
        return cls(
            ModelState.from_json(data.get("model")),
            sanitize_line(string(data, "device")),
            sanitize_line(string(data, "version")),
            integer(data, "num_waiting"),
            integer(data, "batch_size"),
            number(data, "kv_usage"),
            _kept_bytes(mapping(data, "tiers")),
            _notices(data.get("notices") or ()),
        )


def _kept_bytes(tiers: Json) -> tuple[int, ...]:
    return tuple(integer(mapping(tiers, name), "used_bytes") for name in TIERS)


def _notices(value: object) -> tuple[str, ...]:
    texts = value if isinstance(value, (list, tuple)) else ()
    return tuple(sanitize_line(text) for text in texts if isinstance(text, str) and text.strip())


@dataclass(frozen=True)
class ModelOffer:
    """A model of the catalogue or on disk."""

    name: str
    is_installed: bool = False
    size_bytes: int = 0
    download_bytes: int = 0
    licence: str = ""
    context_tokens: int = 0
    description: str = ""
    fits: bool = True

    @classmethod
    def from_json(cls, data: Json) -> ModelOffer:
        return cls(
            sanitize_line(string(data, "name")),
            bool(data.get("installed")),
            integer(data, "size_bytes"),
            integer(data, "download_bytes"),
            sanitize_line(string(data, "licence")),
            integer(data, "context_tokens"),
            sanitize_line(string(data, "description")),
            data.get("fits") is not False,
        )


@dataclass(frozen=True)
class Job:
    """A download or an import that the service works on."""

    id: str
    name: str = ""
    stage: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    rate_bytes_s: float = 0.0
    state: str = "running"
    error: str = ""
    message: str = ""

    @classmethod
    def from_json(cls, data: Json) -> Job:
        return cls(
            str(data.get("id", "")),
            sanitize_line(string(data, "name")),
            sanitize_line(string(data, "stage")),
            integer(data, "done_bytes"),
            integer(data, "total_bytes"),
            number(data, "rate_bytes_s"),
            string(data, "state") or "running",
            sanitize_line(string(data, "error")),
            sanitize_line(string(data, "message")),
        )

    @property
    def share(self) -> float:
        return min(1.0, self.done_bytes / self.total_bytes) if self.total_bytes else 0.0
