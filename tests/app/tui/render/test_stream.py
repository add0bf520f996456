"""Streamed or whole, in any pieces, Markdown gives the same lines; what was committed is never changed."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from chatkv.app.tui.render import stream as stream_module
from chatkv.app.tui.render.palette import ASCII_GLYPHS, Palette
from chatkv.app.tui.render.sanitize import sanitize
from chatkv.app.tui.render.stream import MarkdownStream

PALETTE = Palette()
FRAGMENTS = st.sampled_from(
    [
        "# Title\n",
        "## Sub **bold**\n",
        "text and more text that is long enough to be wrapped at the end\n",
        "\n",
        "\n\n",
        "- item\n",
        "- ",
        "  - nested\n",
        "    deeper\n",
        "1. one\n",
        "10) ten\n",
        "* [ ] open\n",
        "- [x] done\n",
        "> quote\n",
        "> - in quote\n",
        "> ```\n",
        "```python\n",
        "```\n",
        "~~~\n",
        "  ```js\n",
        "def f(x): return '''a\n",
        "/* comment\n",
        "*/ x\n",
        "| a | b |\n",
        "|---|--:|\n",
        "| 1 | `x|y` |\n",
        "| `unclosed | 2 |\n",
        "---\n",
        "***\n",
        "**bold",
        "** and *it*",
        "`code`",
        "[link](http://x.y/(z))",
        "![img](u)",
        "snake_case_name",
        "a\\",
        "\t",
        "日本語 ",
        "👩\u200d👩\u200d👧",
        "&#8238;",
        "&amp;",
        "<b>",
        "word " * 40,
        "x" * 300,
        "1. ```\n",
        "\\*",
        "-",
        "1",
        "`",
        "#",
        ">",
        "|",
    ]
)
SOURCES = st.lists(FRAGMENTS, max_size=40).map("".join)


def render(source: str, width: int = 60, cuts: list[int] | None = None) -> MarkdownStream:
    stream = MarkdownStream(width, PALETTE)
    bounds = sorted({0, len(source), *(cut % (len(source) + 1) for cut in cuts or [])})
    for start, end in pairwise(bounds):
        stream.feed(source[start:end])
        stream.tail()
    stream.finish()
    return stream


def flat(stream: MarkdownStream) -> list[tuple[object, ...]]:
    return [(line.segments, line.joint, line.num_prefix_chars) for line in stream.lines]


def texts(source: str, width: int = 60) -> list[str]:
    return [line.text.rstrip() for line in render(source, width).lines]


@given(SOURCES, st.lists(st.integers(0, 10_000), max_size=30), st.integers(12, 90))
def test_any_pieces_give_what_the_whole_gives(source, cuts, width):
    pieces, whole = render(source, width, cuts), render(source, width)
    assert flat(pieces) == flat(whole)
    assert [block.lines for block in pieces.code_blocks] == [block.lines for block in whole.code_blocks]


@given(SOURCES, st.integers(1, 60))
def test_committed_lines_never_change(source, cut):
    whole = flat(render(source))
    stream = MarkdownStream(60, PALETTE)
    for start in range(0, len(source), cut):
        stream.feed(source[start : start + cut])
        committed = flat(stream)
        assert committed == whole[: len(committed)]


@given(SOURCES, st.integers(48, 90))
def test_no_line_is_wider_than_the_view(source, width):
    """From 48 cells on: eight containers and the text's own minimum fit in them."""
    assert all(cell_len(line.text) <= width for line in render(source, width).lines)


@given(SOURCES)
def test_the_tail_is_how_the_end_would_look_now(source):
    stream = MarkdownStream(60, PALETTE)
    stream.feed(source)
    shown = [line.text for line in [*stream.lines, *stream.tail()]]
    stream.finish()
    assert shown == [line.text for line in stream.lines]


@given(st.text(st.characters() | st.sampled_from("&#;x1bDd9\n`*|->")))
def test_no_source_makes_a_control_character(source):
    for line in render(sanitize(source)).lines:
        assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or 0x202A <= ord(c) <= 0x202E for c in line.text)


def test_the_work_for_one_line_does_not_grow_with_the_answer(monkeypatch):
    """In a list, a fence and a table of any length, each source line is laid out a bounded number of times."""
    laid_out = []
    wrap = stream_module.wrap_runs
    monkeypatch.setattr(stream_module, "wrap_runs", lambda runs, width: laid_out.append(1) or wrap(runs, width))
    for line in ("- item\n", "code = 1\n", "| a | b |\n"):
        head = {"c": "```python\n", "|": "| a | b |\n|---|---|\n"}.get(line[0], "")
        counts = []
        for num_lines in (200, 400):
            laid_out.clear()
            stream = MarkdownStream(60, PALETTE)
            stream.feed(head)
            for _ in range(num_lines):
                stream.feed(line)
                stream.tail()
            counts.append(len(laid_out))
        assert counts[1] <= 2.2 * counts[0] + 50, line


def test_an_endless_line_is_cut_and_keeps_its_text():
    source = "word " * 4000
    assert " ".join(texts(source)).split() == source.split()
    code = render("```\n" + "x" * 9000 + "\n```\n").code_blocks[0]
    assert code.lines == ["x" * 9000]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("# A\ntext", ["A", "text"]),
        ("text\n# A", ["text", "", "A"]),
        ("a\nb", ["a", "b"]),
        ("- a\n- b\n  - c\n  more", ["• a", "• b", "  ◦ c", "    more"]),
        ("1. a\n  - b\n2. c", ["1. a", "   ◦ b", "2. c"]),
        ("- [ ] a\n- [x] b", ["☐ a", "☑ b"]),
        ("> a\nb\n\nc", ["▎ a", "▎ b", "", "c"]),
        ("a\n\n---\n\nb", ["a", "", "─" * 60, "", "b"]),
        ("see [here](http://a.b) or <http://c.d>", ["see here (http://a.b) or http://c.d"]),
        ("snake_case and 2 * 3 * 4", ["snake_case and 2 * 3 * 4"]),
        ("```\n  x\n\n  y\n```\nz", [" text", "   x", "", "   y", "", "z"]),
        ("- a\n  ```\n  x\n  ```\n- b", ["• a", "", "   text", "   x", "", "• b"]),
        ("| a | b |\n|---|--:|\n| 1 | 2 |", ["a    │    b", "─────┼─────", "1    │    2"]),
        ("no | table\nhere", ["no | table", "here"]),
        ("", []),
    ],
)
def test_blocks(source, expected):
    assert texts(source) == expected


def test_code_blocks_keep_their_source():
    stream = render("a\n```python\ndef f():\n\n    return 1\n```\n- b\n  ```\n  two\n  ```\n")
    assert ["\n".join(block.lines) for block in stream.code_blocks] == ["def f():\n\n    return 1", "two"]
    assert stream.code_blocks[0].language == "python"


def test_code_has_colour_and_a_string_over_lines_keeps_it():
    stream = render('```python\nx = """a\nb\n"""\n```')
    colours = [{segment.style.color for segment in line.segments if segment.text.strip()} for line in stream.lines]
    assert colours[2] == {segment.style.color for segment in stream.lines[1].segments if '"""' in segment.text}


def test_a_comment_over_lines_keeps_its_colour():
    lines = render("```c\n/* a\nb */ int x;\n```").lines
    comment = next(segment.style for segment in lines[1].segments if "a" in segment.text)
    assert next(segment.style for segment in lines[2].segments if "b" in segment.text) == comment


def test_unknown_languages_and_very_long_lines_stay_plain():
    lines = render("```nosuchlanguage\nx = 1\n```\n").lines
    assert lines[1].text.strip() == "x = 1"


def test_ascii_glyphs_are_ascii():
    stream = MarkdownStream(40, Palette(glyphs=ASCII_GLYPHS))
    stream.feed("- a\n  - b\n\n> q\n\n---\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n- [ ] t\n")
    stream.finish()
    assert all(line.text.isascii() for line in stream.lines)
