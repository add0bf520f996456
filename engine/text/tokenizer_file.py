"""Reads tokenizer.json and takes apart what chatkv does itself: control tokens, the prefix space, the decoder."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BrokenModelError, UnsupportedModelError

SPM_SPACE = "▁"
_TAG = re.compile(r"</?[a-z_]+>")
_LOSSLESS = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts"})
"""Pre-tokenizers that cut text and drop none of it."""


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token with a text of its own that no merge makes."""

    text: str
    token_id: int
    is_special: bool
    """False: the token is text that a reader sees (`<think>`)."""
    strips_left: bool
    strips_right: bool

    @property
    def is_tag(self) -> bool:
        """`<think>`, `</tool_call>`: visible, and no border of a turn."""
        return not self.is_special and _TAG.fullmatch(self.text) is not None


@dataclass(frozen=True, slots=True)
class PrefixSpace:
    """The space that SentencePiece tokenizers put before a text."""

    scheme: str = "never"
    """"always": before each run; "first": before the whole text only; "never"."""
    is_unconditional: bool = False
    """Also before a text that starts with a space."""


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """What tokenizer.json says. `plain_spec` is its JSON without control tokens and prefix space."""

    plain_spec: dict[str, Any]
    added_tokens: tuple[AddedToken, ...]
    prefix_space: PrefixSpace
    is_byte_level: bool
    is_nfc: bool
    is_lossless: bool
    """Whether the tokens' bytes give the text back, but for the prefix space, NFC and a typed "▁"."""
    bos_text: str | None
    """The token that the post-processor puts before a text, if it does."""


def parse_tokenizer(path: Path) -> TokenizerFile:
    """Raises BrokenModelError (unreadable) or UnsupportedModelError (not BPE) naming the file."""
    try:
        spec = json.loads(path.read_bytes())
        return _take_apart(spec, path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenModelError(
            f"{path} is not a readable tokenizer ({type(error).__name__}: {error}). Pull the model again."
        ) from error


def _take_apart(spec: dict[str, Any], path: Path) -> TokenizerFile:
    model = spec["model"]
    if model.get("type", "BPE") != "BPE":
        raise UnsupportedModelError(f"{path}: tokenizer type {model['type']} is not one chatkv runs; it runs BPE.")
    added = tuple(
        AddedToken(
            text=token["content"],
            token_id=token["id"],
            is_special=token.get("special", False),
            strips_left=token.get("lstrip", False),
            strips_right=token.get("rstrip", False),
        )
        for token in spec.get("added_tokens") or ()
        if token["content"]
    )
    # Runs of blanks that some vocabularies add are text like any other; they are kept where they are.
    control = tuple(token for token in added if not _is_blank_text(token, model["vocab"]))
    control_texts = {token.text for token in control}
    spec["added_tokens"] = [token for token in spec.get("added_tokens") or () if token["content"] not in control_texts]
    _forbid(model, control_texts)

    normalizers = _flatten(spec.get("normalizer"), "normalizers")
    pre_tokenizers = _flatten(spec.get("pre_tokenizer"), "pretokenizers")
    decoders = _flatten(spec.get("decoder"), "decoders")
    prefix_space = _take_prefix_space(normalizers, pre_tokenizers)
    normalizers = [step for step in normalizers if step["type"] != "Prepend"]
    spec["normalizer"] = {"type": "Sequence", "normalizers": normalizers} if normalizers else None
    is_nfc = any(step["type"] == "NFC" for step in normalizers)
    is_lossless = (
        all(step["type"] == "NFC" or _is_space_mark(step) for step in normalizers)
        and all(step["type"] in _LOSSLESS and step.get("behavior") != "Removed" for step in pre_tokenizers)
        and (model.get("unk_token") is None or bool(model.get("byte_fallback")))
    )
    bos_text = _find_bos(spec.get("post_processor"))
    spec["post_processor"] = None
    is_byte_level = any(step["type"] == "ByteLevel" for step in (*decoders, *pre_tokenizers))
    return TokenizerFile(spec, control, prefix_space, is_byte_level, is_nfc, is_lossless, bos_text)


def _is_blank_text(token: AddedToken, vocab: dict[str, int]) -> bool:
    is_blank = not token.text.strip(f" \t\r\n{SPM_SPACE}")
    return is_blank and not token.is_special and vocab.get(token.text) == token.token_id


def _forbid(model: dict[str, Any], control_texts: set[str]) -> None:
    """Takes control tokens out of the vocabulary, and the merges that would make one: plain text cannot reach them."""
    vocab, unknown = model["vocab"], model.get("unk_token")
    for text in control_texts:
        if text != unknown:
            vocab.pop(text, None)

    def makes_control(merge: str | list[str]) -> bool:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        return left + right in control_texts or left in control_texts or right in control_texts

    model["merges"] = [merge for merge in model["merges"] if not makes_control(merge)]


def _flatten(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [inner for part in step[key] for inner in _flatten(part, key)]
    return [step]


def _take_prefix_space(normalizers: list[dict[str, Any]], pre_tokenizers: list[dict[str, Any]]) -> PrefixSpace:
    """Finds the prefix-space rule and switches it off where it stands: runs are encoded one by one, and only the
    caller knows which of them starts a text."""
    found = PrefixSpace()
    if any(step["type"] == "Prepend" for step in normalizers):
        found = PrefixSpace("always", is_unconditional=True)
    for step in pre_tokenizers:
        if step["type"] == "Metaspace":
            scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
            if scheme != "never" and found.scheme == "never":
                found = PrefixSpace(scheme)
            step.pop("add_prefix_space", None)
            step["prepend_scheme"] = "never"
        elif step["type"] == "ByteLevel" and step.get("add_prefix_space"):
            found = PrefixSpace("always")
            step["add_prefix_space"] = False
    return found


def _is_space_mark(step: dict[str, Any]) -> bool:
    return step["type"] == "Replace" and step["pattern"] == {"String": " "} and step["content"] == SPM_SPACE


def _find_bos(post_processor: dict[str, Any] | None) -> str | None:
    for step in _flatten(post_processor, "processors"):
        first = step["single"][0] if step["type"] == "TemplateProcessing" and step["single"] else {}
        if "SpecialToken" in first:
            return first["SpecialToken"]["id"]
    return None
