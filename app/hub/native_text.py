"""The text half of a native model directory: tokenizer.json, tokenizer_config.json, generation_config.json and
chat_template.jinja, from a GGUF's keys or from a Hugging Face directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..errors import UserError
from .gguf_metadata import read_metadata
from .gguf_tokenizer import END_OF_TURN_TOKENS, convert_tokenizer

FALLBACK_TEMPLATE = "plain_chat.jinja"
_SAMPLING_KEYS = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_SPECIAL_KINDS = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True)
class NativeText:
    """What was written, for the manifest."""

    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    num_tokens: int
    has_own_template: bool
    licence: str | None
    """As the weights name it; None when they do not."""


def write_native_text(weights: Path, folder: Path, sampling: Mapping[str, float] = MappingProxyType({})) -> NativeText:
    """Write the tokenizer's files for `weights` (a .gguf file or a Hugging Face directory) into `folder`.

    `sampling` goes into generation_config.json, over what the directory's own one recommends.

    Raises:
        UserError: there is no tokenizer, or one that chatkv cannot read.
    """
    read = _from_directory if weights.is_dir() else _from_gguf
    return read(weights, folder, sampling)


def _from_gguf(file: Path, folder: Path, sampling: Mapping[str, float]) -> NativeText:
    metadata = read_metadata(file)
    tokenizer = convert_tokenizer(metadata, file)
    _write_json(folder / "tokenizer.json", tokenizer.tokenizer_json)
    _write_config(folder, tokenizer.special_tokens, tokenizer.adds_bos)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_ids}
    _write_generation_config(folder, {**ids, "pad_token_id": tokenizer.pad_token_id, **sampling})
    has_template = _write_template(folder, tokenizer.chat_template)
    licence = metadata.get("general.license")
    return NativeText(
        tokenizer.bos_token_id,
        tokenizer.eos_token_ids,
        tokenizer.num_tokens,
        has_template,
        licence if isinstance(licence, str) else None,
    )


def _from_directory(source: Path, folder: Path, sampling: Mapping[str, float]) -> NativeText:
    _take_tokenizer(source, folder)
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception for a damaged file
        raise UserError(f"{source / 'tokenizer.json'} is damaged: {error}.") from error
    config = _read_json(source / "tokenizer_config.json")
    special = {kind: text for kind in _SPECIAL_KINDS if (text := _token_text(config.get(kind))) is not None}
    model_config, generation = _read_json(source / "config.json"), _read_json(source / "generation_config.json")
    eos_ids = [*_ids(generation.get("eos_token_id")), *_ids(model_config.get("eos_token_id"))]
    if "eos_token" in special and (by_text := tokenizer.token_to_id(special["eos_token"])) is not None:
        eos_ids.append(by_text)
    eos_ids += [index for index, added in _added_tokens(tokenizer) if added in END_OF_TURN_TOKENS]
    bos_ids = [*_ids(generation.get("bos_token_id")), *_ids(model_config.get("bos_token_id"))]
    bos_id = tokenizer.token_to_id(special["bos_token"]) if "bos_token" in special else None
    if bos_id is None and bos_ids:
        bos_id = bos_ids[0]
    unique_eos = tuple(dict.fromkeys(eos_ids))
    _write_config(folder, special, bool(config.get("add_bos_token", False)))
    recommended = {key: generation.get(key) for key in _SAMPLING_KEYS}
    _write_generation_config(folder, {"bos_token_id": bos_id, "eos_token_id": unique_eos, **recommended, **sampling})
    has_template = _write_template(folder, _template_of(source, config))
    return NativeText(bos_id, unique_eos, tokenizer.get_vocab_size(), has_template, None)


def _take_tokenizer(source: Path, folder: Path) -> None:
    """Copy tokenizer.json; when only the slow form exists, have transformers convert it (once, at import)."""
    if (source / "tokenizer.json").is_file():
        shutil.copyfile(source / "tokenizer.json", folder / "tokenizer.json")
        return
    if not any((source / name).is_file() for name in ("tokenizer.model", "vocab.json")):
        raise UserError(f"{source} has no tokenizer: neither tokenizer.json, tokenizer.model nor vocab.json.")
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(str(source), local_files_only=True).backend_tokenizer.save(
            str(folder / "tokenizer.json")
        )
    except Exception as error:  # whatever a foreign tokenizer file makes it raise
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"The tokenizer of {source} cannot be converted: {first_line}", "Put a tokenizer.json beside it."
        ) from error


def _template_of(source: Path, config: dict[str, Any]) -> str | None:
    """The model's chat template: its own file first, as transformers has it, then the entries of older layouts."""
    if (file := source / "chat_template.jinja").is_file():
        return file.read_text("utf-8")
    for value in (_read_json(source / "chat_template.json").get("chat_template"), config.get("chat_template")):
        if isinstance(value, str):
            return value
        if isinstance(value, list):  # several named ones; "default" is for chats
            named = {item["name"]: item["template"] for item in value if isinstance(item, dict) and "name" in item}
            if "default" in named:
                return str(named["default"])
    return None


def _write_template(folder: Path, template: str | None) -> bool:
    own = template is not None and template.strip() != ""
    text = template if own else resources.files("chatkv.assets").joinpath(FALLBACK_TEMPLATE).read_text("utf-8")
    assert text is not None
    (folder / "chat_template.jinja").write_text(text, "utf-8")
    return own


def _write_config(folder: Path, special_tokens: dict[str, str], adds_bos: bool) -> None:
    _write_json(folder / "tokenizer_config.json", {**special_tokens, "add_bos_token": adds_bos})


def _write_generation_config(folder: Path, values: dict[str, Any]) -> None:
    _write_json(folder / "generation_config.json", {key: value for key, value in values.items() if value is not None})


def _added_tokens(tokenizer: Any) -> list[tuple[int, str]]:
    return [(index, token.content) for index, token in tokenizer.get_added_tokens_decoder().items()]


def _token_text(value: Any) -> str | None:
    """A token in tokenizer_config.json is its text or a description that has it."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise UserError(f"{file} should hold a JSON object.")
    return value


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, ensure_ascii=False), "utf-8")
