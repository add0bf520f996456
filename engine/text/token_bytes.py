"""From token texts to the bytes they stand for, and how few tokens a text can have."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .tokenizer_file import SPM_SPACE

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CLASSES = (
    frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"),
    frozenset(b"0123456789"),
    frozenset(range(128, 256)),
    frozenset(b" \t\r\n\v\f"),
)
_LETTERS = 0


def byte_level_bytes(text: str) -> bytes:
    """GPT-2's byte-to-character table backwards; a token outside it stands for its own UTF-8."""
    return text.translate(_CHAR_TO_BYTE).encode("latin-1") if _MAPPED.issuperset(text) else text.encode()


def spm_bytes(text: str) -> bytes:
    """SentencePiece: "▁" is a space, `<0x0A>` is one byte."""
    match = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(match[1], 16)]) if match else text.replace(SPM_SPACE, " ").encode()


def _byte_to_char() -> dict[int, str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


_CHAR_TO_BYTE = {ord(char): byte for byte, char in _byte_to_char().items()}
_MAPPED = frozenset(map(chr, _CHAR_TO_BYTE))


@dataclass(frozen=True, slots=True)
class LengthBound:
    """Largest number of bytes, of bytes of each class, and of words that one token can hold.

    Tokens joined give the text's bytes back. So a text with N letters needs at least N / (most letters in a token),
    and the same for any class of byte, and for starts of words: a word starts within some token.
    """

    max_bytes: int
    max_by_class: tuple[int, ...]
    max_words: int
    is_nfc: bool

    @classmethod
    def of(cls, tokens: Iterable[bytes], is_nfc: bool) -> LengthBound:
        longest, words, by_class = 1, 1, [1] * len(_CLASSES)
        joined = [token for token in tokens if len(token) > 1]
        for token in joined:
            longest = max(longest, len(token))
        for start in range(0, len(joined), 4096):
            part = joined[start : start + 4096]
            starts = np.cumsum([0, *map(len, part)])
            data = np.frombuffer(b"".join(part), np.uint8)
            for index, table in enumerate(_TABLES):
                by_class[index] = max(by_class[index], int(np.add.reduceat(table[data], starts[:-1], dtype=int).max()))
            begins = _word_starts(data)
            begins[starts[:-1]] = _TABLES[_LETTERS][data[starts[:-1]]]
            words = max(words, int(np.add.reduceat(begins, starts[:-1], dtype=int).max()))
        return cls(longest, tuple(by_class), words, is_nfc)

    def min_num_tokens(self, text: str) -> int:
        """A lower bound in time linear in the text, some milliseconds a megabyte."""
        if self.is_nfc and not text.isascii():
            text = unicodedata.normalize("NFC", text)
        text = text.replace(SPM_SPACE, " ")  # A SentencePiece tokenizer makes no difference; the bound only falls.
        data = np.frombuffer(text.encode(errors="surrogatepass"), np.uint8)
        if not len(data):
            return 0
        counts = [(len(data), self.max_bytes), (int(_word_starts(data).sum()), self.max_words)]
        for table, most in zip(_TABLES, self.max_by_class, strict=True):
            counts.append((int(np.count_nonzero(table[data])), most))
        return max(-(-count // most) for count, most in counts)


def _word_starts(data: np.ndarray) -> np.ndarray:
    """uint8 bytes [n] -> bool [n]: a letter that no letter precedes."""
    is_letter = _TABLES[_LETTERS][data]
    begins = is_letter.copy()
    begins[1:] &= ~is_letter[:-1]
    return begins


_TABLES = tuple(np.array([byte in members for byte in range(256)]) for members in _CLASSES)
