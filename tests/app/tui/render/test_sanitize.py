"""Nothing that a terminal could obey passes the border to the screen."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from chatkv.app.tui.records import ChatSummary, Message, SearchHit
from chatkv.app.tui.render.sanitize import sanitize, sanitize_line
from chatkv.app.tui.service_records import Job, ModelOffer

BIDI = "".join(
    map(chr, (0x202A, 0x202B, 0x202C, 0x202D, 0x202E, 0x2066, 0x2067, 0x2068, 0x2069, 0x200E, 0x200F, 0x61C))
)
HOSTILE = st.text(st.characters() | st.sampled_from("\x1b\x07\x9b\x9d\x90\r\n\t\x00\x7f" + BIDI))


def is_harmless(text: str, allowed: str) -> bool:
    return all(
        character in allowed or (unicodedata.category(character) not in ("Cc", "Cs") and character not in BIDI)
        for character in text
    )


@given(HOSTILE)
def test_no_control_character_survives(text):
    assert is_harmless(sanitize(text), "\n\t")
    assert is_harmless(sanitize_line(text), "")


@given(HOSTILE, HOSTILE)
def test_a_stream_may_be_cut_anywhere(first, second):
    assert sanitize(first) + sanitize(second) == sanitize(first + second)


@given(HOSTILE)
def test_sanitising_twice_changes_nothing_more(text):
    assert sanitize(sanitize(text)) == sanitize(text)


def test_an_escape_is_shown_and_ordinary_text_is_untouched():
    assert sanitize("\x1b]0;title\x07") == "␛]0;title"
    assert sanitize("Campanhã\t27 €\n👩‍👩‍👧 日本語 עברית") == "Campanhã\t27 €\n👩‍👩‍👧 日本語 עברית"
    assert sanitize("a\r\nb") == "a\nb"
    assert sanitize("\udc80") == "�"
    assert sanitize_line(" two\nlines\t") == "two lines"


def test_every_string_of_the_service_is_sanitised_as_it_enters():
    hostile = "\x1b]0;x\x07\x9b31m‮"
    records = (
        Message.from_json({"id": "1", "content": hostile, "error": hostile, "model": hostile}),
        ChatSummary.from_json({"id": "1", "title": hostile, "model": hostile}),
        Job.from_json({"id": "1", "name": hostile, "stage": hostile, "error": hostile, "message": hostile}),
        ModelOffer.from_json({"name": hostile, "licence": hostile, "description": hostile}),
        SearchHit.from_json({"chat_id": "1", "title": hostile, "message_id": "2", "snippet": hostile}),
    )
    for record in records:
        assert is_harmless(str(record), "\n"), record
