"""Turns the tokenizer that a GGUF describes into a tokenizer.json, the form that `tokenizers` loads.

Two families: byte-level BPE (`gpt2`: Llama 3, Qwen, SmolLM, ...) with the merges from the file, and SentencePiece BPE
with byte fallback (`llama`: Llama 2, Mistral, TinyLlama, ...) whose merges follow from the scores, best score first, as
in llama.cpp. Written out as JSON directly: no library has to be loaded, and nothing is guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from .pre_tokenizers import PRE_TOKENIZERS

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "▁"

END_OF_TURN_TOKENS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|end|>",
        "<end_of_turn>",
        "<｜end▁of▁sentence｜>",
        "<EOT>",
        "_<EOT>",
    }
)
"""Special tokens that end an answer whether or not the file says so (llama.cpp's list)."""


@dataclass(frozen=True)
class GgufTokenizer:
    tokenizer_json: dict[str, Any]
    num_tokens: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """The file's own end token first, then its end-of-turn tokens and those known by name."""
    pad_token_id: int | None
    adds_bos: bool
    """Whether the model expects its begin token before a prompt that is not a chat."""
    special_tokens: dict[str, str]
    """bos_token, eos_token, unk_token, pad_token: their text."""
    chat_template: str | None


def convert_tokenizer(metadata: dict[str, Any], file: Path) -> GgufTokenizer:
    """Build the tokenizer from a GGUF's keys (`read_metadata`).

    Raises:
        UserError: no tokenizer in the file, or one of a kind that is not known; names it.
    """
    tokens = _list_of(metadata, "tokenizer.ggml.tokens", str, file)
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise UserError(f"{file} is damaged: {len(tokens)} tokens but {len(types)} token types.")
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer_json = _byte_level(metadata, tokens, file)
    elif model == "llama":
        tokenizer_json = _sentencepiece(metadata, tokens, types, file)
    else:
        raise UserError(
            f"{file} has a tokenizer of the kind '{model}', which chatkv does not read.",
            "Known are gpt2 (byte-level BPE) and llama (SentencePiece BPE). Choose another model.",
        )
    tokenizer_json["added_tokens"] = _added_tokens(tokens, types)
    special_ids = {
        kind: _token_id(metadata, key, len(tokens))
        for kind, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items()
    }
    cut = PRE_TOKENIZERS.get(str(metadata.get("tokenizer.ggml.pre")))
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", model == "llama" or (cut is not None and cut.adds_bos))
    bos_id = special_ids["bos"]
    if adds_bos and bos_id is not None:
        tokenizer_json["post_processor"] = _begin_with(tokens[bos_id], bos_id)
    return GgufTokenizer(
        tokenizer_json=tokenizer_json,
        num_tokens=len(tokens),
        bos_token_id=special_ids["bos"],
        eos_token_ids=_eos_ids(metadata, tokens, types),
        pad_token_id=special_ids["pad"],
        adds_bos=bool(adds_bos),
        special_tokens={f"{kind}_token": tokens[i] for kind, i in special_ids.items() if i is not None},
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _byte_level(metadata: dict[str, Any], tokens: list[str], file: Path) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre is None:
        raise UserError(
            f"{file} does not say how its tokenizer cuts text (tokenizer.ggml.pre): it was made before May 2024.",
            "Every guess would cost quality. Choose a newer conversion of this model.",
        )
    if pre not in PRE_TOKENIZERS:
        raise UserError(
            f"{file} cuts text in a way called '{pre}', which chatkv does not know.",
            f"Known: {', '.join(sorted(PRE_TOKENIZERS))}. Choose another model.",
        )
    cut = PRE_TOKENIZERS[pre]
    merges = [merge.split(" ", 1) for merge in _list_of(metadata, "tokenizer.ggml.merges", str, file)]
    if any(len(merge) != 2 for merge in merges):
        raise UserError(f"{file} is damaged: a BPE merge does not have two parts.")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return _tokenizer_json(
        model=_bpe(tokens, merges, ignore_merges=cut.ignores_merges),
        normalizer={"type": "NFC"} if cut.is_nfc else None,
        pre_tokenizer=cut.steps(),
        decoder=byte_level,
    )


def _sentencepiece(metadata: dict[str, Any], tokens: list[str], types: list[int], file: Path) -> dict[str, Any]:
    if "tokenizer.ggml.merges" in metadata:
        merges = [merge.split(" ", 1) for merge in _list_of(metadata, "tokenizer.ggml.merges", str, file)]
    else:
        scores = _list_of(metadata, "tokenizer.ggml.scores", float, file)
        if len(scores) != len(tokens):
            raise UserError(f"{file} is damaged: {len(tokens)} tokens but {len(scores)} scores.")
        merges = merges_from_scores(tokens, scores, types)
    has_prefix_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    unknown_id = _token_id(metadata, "unknown", len(tokens))
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if has_prefix_space else []
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix_space:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = None if unknown_id is None else tokens[unknown_id]
    return _tokenizer_json(
        model=_bpe(tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
        normalizer={"type": "Sequence", "normalizers": [*prepend, replace]},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
    )


def merges_from_scores(tokens: list[str], scores: list[float], types: list[int]) -> list[list[str]]:
    """The merges that a SentencePiece vocabulary implies: every way to put a token together from two others, the
    tokens with the best score first. None of them yields a control token: typed text must never become one."""
    parts = {token for token, kind in zip(tokens, types, strict=True) if kind not in (_CONTROL, _UNKNOWN)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        if token in parts:
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in parts and right in parts:
                    ranked.append((score, len(left), len(right), left, right))
    ranked.sort(key=lambda merge: merge[:3], reverse=True)
    return [[left, right] for *_, left, right in ranked]


def _bpe(
    tokens: list[str],
    merges: list[list[str]],
    *,
    unk_token: str | None = None,
    fuse_unk: bool = False,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk_token,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": fuse_unk,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": {token: index for index, token in enumerate(tokens)},
        "merges": merges,
    }


def _tokenizer_json(
    *,
    model: dict[str, Any],
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any] | None,
    decoder: dict[str, Any],
) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def _begin_with(token: str, token_id: int) -> dict[str, Any]:
    """The post-processor that says: a text begins with this token."""
    begin = {"SpecialToken": {"id": token, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, begin, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def _added_tokens(tokens: list[str], types: list[int]) -> list[dict[str, Any]]:
    """Control and unknown tokens are special (left out of decoded text); user-defined ones are plain text that is
    always one token. All are found in the raw text, before normalising."""
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
    ]


def _eos_ids(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> tuple[int, ...]:
    named = [_token_id(metadata, key, len(tokens)) for key in ("eos", "eot", "eom")]
    by_text = [
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if token in END_OF_TURN_TOKENS and kind in (_CONTROL, _USER_DEFINED)
    ]
    return tuple(dict.fromkeys(i for i in [*named, *by_text] if i is not None))


def _token_id(metadata: dict[str, Any], kind: str, num_tokens: int) -> int | None:
    """An id that the file names; one outside the vocabulary (some files have 2^32-1) counts as none."""
    value = metadata.get(f"tokenizer.ggml.{kind}_token_id")
    return value if isinstance(value, int) and 0 <= value < num_tokens else None


def _list_of(metadata: dict[str, Any], key: str, kind: type, file: Path) -> list[Any]:
    values = metadata.get(key)
    if not isinstance(values, list) or not values or not isinstance(values[0], kind):
        raise UserError(f"{file} carries no {key}, so it has no tokenizer.", "Choose a GGUF of a chat model.")
    return values
