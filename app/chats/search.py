"""Full-text search for what a person types: never an error, whatever the query holds.

Words go to FTS5 as quoted strings, the last one as a prefix. Its tokenizer has no words for emoji and none inside CJK
text, so such terms are looked for in the text itself.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from . import tree
from .database import ChatDatabase, clean_text
from .records import Role, SearchHit

MAX_QUERY_CHARS = 500
MAX_TERMS = 16
MAX_RANKED = 5000
"""Of a word that is everywhere, the newest matches are weighed against each other: the search stays quick."""
SNIPPET_WORDS = 16
SNIPPET_CHARS = 120

_OPEN, _CLOSE = "\x02", "\x03"
_NO_WORD_BREAKS = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)


@dataclass(frozen=True, slots=True)
class SearchTerms:
    words: tuple[str, ...]
    """For the index."""
    pieces: tuple[str, ...]
    """For a scan of the text."""

    @property
    def fts(self) -> str:
        """The FTS5 expression: all words, the last as a prefix."""
        quoted = ['"' + word.replace('"', '""') + '"' for word in self.words]
        return " ".join(quoted) + "*" if quoted else ""


def parse(query: str) -> SearchTerms:
    """Split what a person typed; operators, quotes and punctuation have no meaning beyond separating words."""
    words: list[str] = []
    pieces: list[str] = []
    for term in clean_text(query)[:MAX_QUERY_CHARS].replace("\0", " ").split()[:MAX_TERMS]:
        if not any(_is_token_char(char) for char in term) or _NO_WORD_BREAKS.search(term):
            if any(unicodedata.category(char)[0] not in "CZ" for char in term):
                pieces.append(term)
        else:
            words.append(term)
    return SearchTerms(tuple(words), tuple(pieces))


def search(db: ChatDatabase, query: str, limit: int) -> list[SearchHit]:
    """The best matches outside the trash, at most `limit`."""
    terms = parse(query)
    if limit <= 0 or not (terms.words or terms.pieces):
        return []
    hits: list[SearchHit] = []
    homes = _Homes(db)
    for row in _matches(db, terms):
        chat = homes.live_chat(row["id"], row["chat_id"])
        if chat is None:
            continue
        snippet, found = (
            _marked(row["snippet"]) if row["snippet"] is not None else _around(row["content"], terms.pieces)
        )
        role = Role(row["role"]) if row["role"] in set(Role) else Role.USER
        hits.append(SearchHit(chat[0], chat[1], row["id"], role, snippet, found))
        if len(hits) == limit:
            break
    return hits


def chat_ids(db: ChatDatabase, query: str) -> set[str]:
    """The chats, in the trash too, with a message that matches."""
    terms = parse(query)
    if not (terms.words or terms.pieces):
        return set()
    homes = _Homes(db)
    return {
        chat_id
        for row in _matches(db, terms, is_ranked=False)
        for chat_id in homes.all_chats(row["id"], row["chat_id"])
    }


def _matches(db: ChatDatabase, terms: SearchTerms, is_ranked: bool = True) -> Iterator[dict[str, Any]]:
    """Rows of messages, best first if ranked; with a snippet from the index, or else the text."""
    scan = "".join(f" and instr(m.content, :piece{i}) > 0" for i in range(len(terms.pieces)))
    parameters: dict[str, Any] = {f"piece{i}": piece for i, piece in enumerate(terms.pieces)} | {"fts": terms.fts}
    if not is_ranked:
        columns = "m.id, m.chat_id"
    elif terms.words:
        snippet = f"snippet(messages_fts, 0, '{_OPEN}', '{_CLOSE}', '…', {SNIPPET_WORDS})"
        columns = f"m.id, m.chat_id, m.role, {snippet} as snippet"
    else:
        columns = "m.id, m.chat_id, m.role, m.content, null as snippet"
    if terms.words:
        newest = (
            " and messages_fts.rowid >= (select min(rowid) from (select rowid from messages_fts "
            f"where messages_fts match :fts order by rowid desc limit {MAX_RANKED}))"
        )
        yield from db.each(
            f"select {columns} from messages_fts cross join messages m on m.seq = messages_fts.rowid "
            f"where messages_fts match :fts{newest if is_ranked else ''}{scan}"
            f"{' order by messages_fts.rank' if is_ranked else ''}",
            parameters,
        )
    else:
        yield from db.each(f"select {columns} from messages m where true{scan} order by m.seq desc", parameters)


class _Homes:
    """In which chats a message can be seen: the one it was written in, and the forks that took it over."""

    def __init__(self, db: ChatDatabase):
        self.db = db
        self.chats = {row["id"]: row for row in db.rows("select id, title, trashed_at from chats")}

    @cached_property
    def forks_of(self) -> dict[str, list[str]]:
        """Message id to the forks that took it over."""
        found: dict[str, list[str]] = {}
        forks = self.db.rows("select id from chats where forked_at_id is not null order by updated_at desc")
        for fork in forks:
            for message_id in tree.inherited_ids(self.db, fork["id"]):
                found.setdefault(message_id, []).append(fork["id"])
        return found

    def all_chats(self, message_id: str, written_in: str) -> list[str]:
        return [written_in, *self.forks_of.get(message_id, [])]

    def live_chat(self, message_id: str, written_in: str) -> tuple[str, str] | None:
        for chat_id in self._candidates(message_id, written_in):
            chat = self.chats.get(chat_id)
            if chat and chat["trashed_at"] is None:
                return chat_id, str(chat["title"])
        return None

    def _candidates(self, message_id: str, written_in: str) -> Iterator[str]:
        yield written_in
        yield from self.forks_of.get(message_id, [])


def _is_token_char(char: str) -> bool:
    """What unicode61 makes words of: letters, digits, private use."""
    category = unicodedata.category(char)
    return category[0] in "LN" or category == "Co"


def _marked(text: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    """One line without the markers, and where they were."""
    plain = ""
    found: list[tuple[int, int]] = []
    start: int | None = None
    for part in re.split(f"([{_OPEN}{_CLOSE}])", re.sub(r"\s+", " ", text)):
        if part == _OPEN:
            start = len(plain)
        elif part == _CLOSE:
            if start is not None and start < len(plain):
                found.append((start, len(plain)))
            start = None
        else:
            plain += part
    return plain, tuple(found)


def _around(content: str, pieces: tuple[str, ...]) -> tuple[str, tuple[tuple[int, int], ...]]:
    first = max(content.find(pieces[0]), 0)
    start = max(first - SNIPPET_CHARS // 4, 0)
    end = start + SNIPPET_CHARS
    text = ("…" if start else "") + content[start:end] + ("…" if end < len(content) else "")
    for piece in pieces:
        text = text.replace(piece, f"{_OPEN}{piece}{_CLOSE}")
    return _marked(text)
