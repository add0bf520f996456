"""Text to token ids and back, exact to the byte. What a person typed never becomes a control token here."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

# One text at a time: a pool of threads would take the engine's cores.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tokenizers

from ..errors import BrokenModelError
from .token_bytes import LengthBound, byte_level_bytes, spm_bytes
from .tokenizer_file import SPM_SPACE, AddedToken, TokenizerFile, parse_tokenizer
from .word_trie import any_of

_END_OF_TURN_TEXTS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "</s>", "<|end_of_text|>")


class Tokenizer:
    """Thread-safe. Holds the model's BPE without its control tokens; those are matched here, by the caller's choice."""

    def __init__(self, path: Path, eos_ids: Iterable[int] = (), bos_id: int | None = None):
        """`path`: tokenizer.json. Raises BrokenModelError, UnsupportedModelError."""
        file = parse_tokenizer(path)
        self.content_hash = hashlib.sha256(path.read_bytes()).hexdigest()
        """SHA-256 of tokenizer.json: stored ids mean something only together with it."""
        self._plain = _load_plain(file, path)
        self._prefix_space = file.prefix_space
        self.special_tokens: dict[str, AddedToken] = {token.text: token for token in file.added_tokens}
        """Every control token by its text: those that mark turns, and visible ones such as `<think>`."""
        self._id_to_bytes = _all_bytes(self._plain.get_vocab(), file)
        self.hidden_ids = frozenset(token.token_id for token in file.added_tokens if token.is_special)
        """Control tokens that are not text."""
        self._bound = LengthBound.of(_text_tokens(self._id_to_bytes, file), file.is_nfc) if file.is_lossless else None
        self.special_pattern = re.compile(any_of(self.special_tokens))
        """Matches the longest control token that begins at a position."""
        self.adds_bos = file.bos_text is not None
        self.bos_id = bos_id if bos_id is not None else self.special_ids.get(file.bos_text or "")
        self._ordered_eos_ids = list(dict.fromkeys(eos_ids)) or [
            self.special_tokens[text].token_id for text in _END_OF_TURN_TEXTS if text in self.special_tokens
        ]

    @classmethod
    def from_dir(cls, native_dir: Path) -> Tokenizer:
        """tokenizer.json, and the ids that chatkv.json, generation_config.json and config.json declare."""
        eos_ids: list[int] = []
        bos_id = None
        for name in ("chatkv.json", "generation_config.json", "config.json"):
            facts = _read_json(native_dir / name)
            for key in ("eos_token_ids", "eos_token_id"):
                declared = facts.get(key)
                eos_ids += declared if isinstance(declared, list) else [] if declared is None else [declared]
            bos_id = facts.get("bos_token_id") if bos_id is None else bos_id
        return cls(native_dir / "tokenizer.json", eos_ids, bos_id)

    @property
    def vocab_size(self) -> int:
        """Highest id plus one. A model may have more rows."""
        return len(self._id_to_bytes)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end an answer: as declared, else the usual names of such tokens."""
        return frozenset(self._ordered_eos_ids)

    @property
    def first_eos_id(self) -> int | None:
        """The one declared first: what a template knows as `eos_token`."""
        return next(iter(self._ordered_eos_ids), None)

    @property
    def special_ids(self) -> dict[str, int]:
        return {text: token.token_id for text, token in self.special_tokens.items()}

    @property
    def has_prefix_space(self) -> bool:
        return self._prefix_space.scheme != "never"

    def encode_run(self, text: str, *, is_run_start: bool = True, is_text_start: bool = False) -> list[int]:
        """Plain text between two control tokens, tokenised whole. Never a control token, whatever the text says.

        `is_run_start` is False right after a sampled answer, where a prefix space would be a second one.
        The GIL is released meanwhile (it is not in `tokenizers.Tokenizer.encode`).
        """
        if not text:
            return []
        has_space = text.startswith((" ", SPM_SPACE)) and not self._prefix_space.is_unconditional
        if is_run_start and not has_space and self.is_prefixed_at(is_text_start):
            text = " " + text
        return self._plain.encode_batch_fast([_without_surrogates(text)], add_special_tokens=False)[0].ids

    def encode_with_special(self, text: str) -> list[int]:
        """A trusted text in which control tokens are written out. Adds no BOS."""
        ids: list[int] = []
        position, previous = 0, None
        for match in (*self.special_pattern.finditer(text), None):
            token = self.special_tokens[match[0]] if match else None
            run = text[position : match.start() if match else len(text)]
            run = run.lstrip() if previous and previous.strips_right else run
            run = run.rstrip() if token and token.strips_left else run
            ids += self.encode_run(run, is_text_start=previous is None)
            if match and token:
                ids.append(token.token_id)
                position, previous = match.end(), token
        return ids

    def is_prefixed_at(self, is_text_start: bool) -> bool:
        """Whether a run has the prefix space: each one, or the one at the start of the text."""
        return self._prefix_space.scheme == "always" or (self._prefix_space.scheme == "first" and is_text_start)

    def decode(self, ids: Sequence[int], *, is_text_start: bool = True) -> str:
        """The text of the ids; hidden tokens are none. Bytes that are not UTF-8 become U+FFFD.

        `is_text_start`: the prefix space of a SentencePiece tokenizer is not part of the text.
        """
        data = b"".join(map(self.token_bytes, ids))
        if is_text_start and self.has_prefix_space and data.startswith(b" "):
            data = data[1:]
        return codecs.decode(data, "utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text. Hidden tokens and rows without a token add none."""
        if not 0 <= token_id < len(self._id_to_bytes) or token_id in self.hidden_ids:
            return b""
        return self._id_to_bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """A token as a person may see it: control tokens by their text."""
        if 0 <= token_id < len(self._id_to_bytes):
            return codecs.decode(self._id_to_bytes[token_id], "utf-8", "replace")
        return ""

    def min_num_tokens(self, text: str) -> int:
        """A cheap lower bound: a text that cannot fit can be refused without tokenising it."""
        return self._bound.min_num_tokens(text) if self._bound else 0


def _load_plain(file: TokenizerFile, path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(file.plain_spec))
    except Exception as error:  # The Rust side raises bare exceptions.
        raise BrokenModelError(f"{path} is not a valid tokenizer: {error}. Pull the model again.") from error


def _all_bytes(vocab: dict[str, int], file: TokenizerFile) -> list[bytes]:
    """Indexed by id; b"" where no token has that id."""
    to_bytes = byte_level_bytes if file.is_byte_level else spm_bytes
    by_id = {token_id: to_bytes(text) for text, token_id in vocab.items()}
    by_id |= {token.token_id: token.text.encode() for token in file.added_tokens}
    return [by_id.get(token_id, b"") for token_id in range(max(by_id) + 1)]


def _text_tokens(id_to_bytes: Sequence[bytes], file: TokenizerFile) -> list[bytes]:
    control = {token.token_id for token in file.added_tokens}
    return [data for token_id, data in enumerate(id_to_bytes) if token_id not in control]


def _without_surrogates(text: str) -> str:
    """JSON may carry half a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _read_json(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise BrokenModelError(f"{path} is not valid JSON ({error}). Pull the model again.") from error
    return facts if isinstance(facts, dict) else {}
