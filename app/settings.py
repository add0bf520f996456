"""The settings file (`settings.toml`) and its environment overrides (`CHATKV_...`)."""

from __future__ import annotations

import difflib
import os
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import ByteSize, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from .errors import UserError
from .paths import Paths

DEFAULT_MODEL = "smollm2-135m"
MIN_KV_DISK_BYTES = 16 << 20
"""A disk store that cannot hold a few blocks of a small model is a mistake; 0 turns it off."""


class Settings(BaseSettings):
    """Every field can be set in settings.toml or as CHATKV_<NAME>; the environment wins."""

    model_config = SettingsConfigDict(env_prefix="CHATKV_", extra="forbid", frozen=True, env_ignore_empty=True)

    model: str = DEFAULT_MODEL
    """Model that the service loads when none was used before."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: a GPU if one can be used, and else the CPU; `chatkv status` says which and why."""
    gpu: int | None = Field(None, ge=0)
    """Index of the GPU; default: the one with most free memory."""
    gpu_reserve_bytes: ByteSize | None = None
    """What stays free on the GPU for other programs; default max(600 MiB, 6 %), or 256 MiB where no screen is drawn."""
    deterministic: bool = False
    """On a GPU: a reply's numbers do not depend on the chats beside it; slower. On the CPU it is always so."""
    host: str = "127.0.0.1"
    """Address of the TCP socket; only loopback addresses are accepted."""
    port: int = Field(8321, ge=0, le=65535)
    """0 picks a free port."""
    tcp: bool = True
    """Off: unix socket only."""
    no_key: bool = False
    """TCP without a key, for editors that have no field for one."""
    allowed_origins: list[str] = []
    """Web pages that may call the TCP socket, such as "vscode-webview://id"; none by default."""
    any_model: bool = False
    """Answer requests for unknown model names with the loaded model instead of 404."""
    idle_exit_s: float = Field(3600.0, ge=0)
    """The service stops after this long without a client or a request; 0 never."""
    context_tokens: int = Field(8192, ge=64)
    """Longest conversation, if the model allows it."""
    kv_bytes: ByteSize | None = Field(None, ge=1)
    """Size of the device pool; default what is left on a GPU, min(25 % of RAM, 4 GiB) on the CPU, at least one context.
    Sizes are bytes, or text such as "20GiB"."""
    kv_disk_bytes: ByteSize | None = None
    """What the disk store may take, everything counted; default min(25 % of free disk space, 50 GiB), fixed at the
    first start. 0: nothing of a conversation's state is kept on disk, and what was kept is removed."""
    kv_host_bytes: ByteSize | None = None
    """RAM for blocks that leave the device; default min(25 % of RAM, 16 GiB) on a GPU, none on the CPU, whose pool is
    RAM itself."""
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """int8 takes little more than half of the memory and disk per token, at a small cost in quality; fp8 takes as much,
    on a GPU only."""
    weight_format: Literal["auto", "as-is", "bf16", "fp8", "int8", "int4", "nf4", "int8-bnb"] = "auto"
    """What weights that a model's file holds as floats become; what is quantised there is kept exactly. auto: on a GPU
    the best that leaves room for eight chats, on the CPU int8 where chatkv's own kernels then run the model. Made once,
    and kept beside the model. nf4 and int8-bnb are bitsandbytes': for comparison, slow on the CPU."""
    kv_encryption: bool = False
    """Encrypt the disk store; its key is a file beside the service's other keys."""
    idle_unload_s: float = Field(3600.0, ge=0)
    """The model leaves memory after this long without a request, and the next one loads it again; 0 never."""
    max_num_seqs: int = Field(32, ge=1, le=512)
    max_num_waiting: int = Field(64, ge=1, le=4096)
    nice: int = Field(5, ge=0, le=19)
    """How far the service stands back behind other programs, the terminal app among them."""
    threads: int | None = Field(None, ge=1)
    """Threads of the CPU kernels; default: physical cores."""
    cpu_kernels: Literal["auto", "torch"] = "auto"
    """auto: chatkv's own kernels where they can be had and suit the model; torch is several times slower."""
    check_integrity: bool = False
    ascii_ui: bool = False
    """Plain ASCII glyphs in the terminal app."""
    mouse: bool = True
    theme: str = "textual-dark"

    @field_validator("kv_disk_bytes")
    @classmethod
    def _check_disk_bytes(cls, value: ByteSize | None) -> ByteSize | None:
        if value is not None and value != 0 and value < MIN_KV_DISK_BYTES:
            raise ValueError(f"must be 0 (off) or at least {MIN_KV_DISK_BYTES >> 20} MiB, which is a few blocks")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return env_settings, init_settings


def load_settings(paths: Paths) -> Settings:
    """Read the settings file, if there is one, and the environment.

    Raises:
        UserError: the file cannot be read or is not TOML, or a value is not allowed; names where it stands and the
            field.
    """
    file = paths.settings_file
    try:
        return Settings(**_read_toml(file))
    except ValidationError as error:
        raise _as_user_error(error, file) from error
    except SettingsError as error:  # A list in the environment that is not JSON.
        raise UserError(f"{_sentence(error)}.", 'Lists are written like this: ["one", "two"].') from error


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"Cannot read {file}: {error.strerror}.", "Mend it, or move it away.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not valid TOML: {error}.", "Mend the line, or move the file away.") from error


def _as_user_error(error: ValidationError, file: Path) -> UserError:
    first = error.errors()[0]
    name = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, Settings.model_fields, 1)
        hint = f"Did you mean '{near[0]}'?" if near else "The README lists the settings."
        return UserError(f"There is no setting '{name}'. It stands in {file}.", hint)
    variable = f"CHATKV_{name.upper()}"
    is_from_env = any(key.upper() == variable and value for key, value in os.environ.items())
    where = f"the environment variable {variable}" if is_from_env else str(file)
    field = ".".join(str(part) for part in first["loc"])
    said = first["msg"].removeprefix("Value error, ")
    if first["type"].startswith("byte_size"):
        said = 'not a size: write a number of bytes, or text such as "20GiB"'
    return UserError(f"Setting '{field}': {said}.", f"It comes from {where}.")


def _sentence(error: Exception) -> str:
    text = str(error)
    return text[:1].upper() + text[1:].replace('from source "EnvSettingsSource"', "from the environment")
