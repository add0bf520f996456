"""The transcript: lays out what is in view, keeps the eye where it is, copies the source."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from pilots import wait_until
from textual.app import App, ComposeResult
from textual.geometry import Offset
from textual.pilot import Pilot
from textual.selection import Selection

from chatkv.app.tui.board import LiveReply
from chatkv.app.tui.records import Message
from chatkv.app.tui.render.palette import Palette
from chatkv.app.tui.widgets.item import TranscriptItem
from chatkv.app.tui.widgets.selection import selected
from chatkv.app.tui.widgets.transcript import Transcript

MARKDOWN = (
    "# Title\n\nSome **bold** text and a list:\n\n- one\n- two\n\n```python\nprint(1)\n```\n\n" + "more words " * 20
)


class Host(App[None]):
    def compose(self) -> ComposeResult:
        yield Transcript(Palette())


def message(index: int, content: str | None = None) -> Message:
    is_reply = index % 2 == 1
    text = content if content is not None else MARKDOWN if is_reply else f"question {index}"
    return Message(f"m{index}", role="assistant" if is_reply else "user", content=text)


@asynccontextmanager
async def showing(
    num_messages: int, size: tuple[int, int] = (80, 24)
) -> AsyncGenerator[tuple[Pilot, Transcript], None]:
    async with Host().run_test(size=size) as pilot:
        transcript = pilot.app.query_one(Transcript)
        transcript.show([TranscriptItem(message(index)) for index in range(num_messages)])
        await pilot.pause()
        yield pilot, transcript


def rows(transcript: Transcript) -> list[str]:
    return ["".join(s.text for s in transcript.render_line(y)).rstrip() for y in range(transcript.size.height)]


def check_integrity(transcript: Transcript) -> None:
    """Sizes agree with what was laid out, and everything in view is laid out."""
    starts = transcript.stack.starts
    assert starts[-1] == sum(item.height for item in transcript.items) == transcript.virtual_size.height
    for index, item in enumerate(transcript.items):
        if item.is_laid_out:
            assert item.height == len(item.lines)
        if starts[index] < transcript.scroll_y + transcript.size.height and starts[index + 1] > transcript.scroll_y:
            assert item.is_laid_out, f"message {index} is in view as a blank"


async def test_only_what_is_in_view_is_laid_out():
    async with showing(2000) as (_, transcript):
        assert sum(item.is_laid_out for item in transcript.items) < 10
        assert transcript.scroll_y == transcript.max_scroll_y
        check_integrity(transcript)


async def test_drawing_changes_no_sizes():
    async with showing(200) as (_, transcript):
        before = (list(transcript.stack.starts), transcript.virtual_size, transcript.scroll_y)
        rows(transcript)
        assert (list(transcript.stack.starts), transcript.virtual_size, transcript.scroll_y) == before


async def test_going_up_line_by_line_shows_every_line_once():
    async with showing(16) as (pilot, transcript):
        seen = [rows(transcript)[0]]
        while transcript.scroll_y > 0:
            below = rows(transcript)[:-1]
            transcript.scroll_lines(-1)
            await pilot.pause()
            check_integrity(transcript)
            assert rows(transcript)[1:] == below, "only one line may come in at the top"
            seen.append(rows(transcript)[0])
        whole = [line.text for item in transcript.items for line in item.lines]
        assert [line.strip() for line in reversed(seen)] == [line.strip() for line in whole[: len(seen)]]


async def test_jumps_land_on_laid_out_messages():
    async with showing(500) as (pilot, transcript):
        for target in (0.5, 0.1, 0.9, 0.0, 0.33):
            transcript.scroll_to(y=int(transcript.max_scroll_y * target), animate=False)
            await pilot.pause()
            check_integrity(transcript)


async def test_a_resize_keeps_the_message_at_the_top():
    async with showing(300) as (pilot, transcript):
        transcript.mark_message("m150")
        await pilot.pause()
        transcript.scroll_to(y=transcript.stack.starts[150], animate=False)
        await pilot.pause()
        assert rows(transcript)[1].endswith("question 150")
        for width in (50, 120, 64):
            await pilot.resize_terminal(width, 24)
            await wait_until(pilot, lambda width=width: transcript.size.width == width, "resized")
            await pilot.pause()
            assert rows(transcript)[1].endswith("question 150")
            check_integrity(transcript)


async def test_the_end_is_followed_until_the_person_goes_up():
    async with showing(10) as (pilot, transcript):
        transcript.append(TranscriptItem(message(11, "short")))
        index = len(transcript.items) - 1
        live = LiveReply("c", phase="writing")
        transcript.set_live(index, live)
        for number in range(40):
            added = f"line {number}\n\n"
            grown = transcript.items[index].message.extended(added)
            transcript.extend(index, grown, added)
        await pilot.pause()
        assert transcript.scroll_y == transcript.max_scroll_y
        assert "line 39" in "\n".join(rows(transcript))
        transcript.scroll_lines(-5)
        await pilot.pause()
        assert not transcript.is_following
        above = rows(transcript)[:-1]
        transcript.extend(index, transcript.items[index].message.extended("new\n\nnew\n\n"), "new\n\nnew\n\n")
        await pilot.pause()
        assert rows(transcript)[:-1] == above, "nothing moves under the eye"
        assert "4 new lines · End" in rows(transcript)[-1]
        transcript.focus()
        await pilot.press("end")
        await pilot.pause()
        assert transcript.is_following
        assert transcript.num_unseen_lines == 0
        transcript.replace(index, transcript.items[index].message, None)
        await pilot.pause()
        assert transcript.scroll_y == transcript.max_scroll_y
        check_integrity(transcript)


async def test_streamed_text_ends_as_the_text_shown_whole():
    async with showing(1) as (pilot, transcript):
        transcript.append(TranscriptItem(message(1, "")))
        transcript.set_live(1, LiveReply("c", phase="writing"))
        for character in MARKDOWN:
            transcript.extend(1, transcript.items[1].message.extended(character), character)
        transcript.set_live(1, None)
        await pilot.pause()
        streamed = [line.text for line in transcript.items[1].lines]
        transcript.show([TranscriptItem(message(0)), TranscriptItem(message(1))])
        await pilot.pause()
        assert streamed == [line.text for line in transcript.items[1].lines]


async def test_the_mark_moves_by_messages_and_comes_into_view():
    async with showing(50) as (pilot, transcript):
        transcript.focus()
        transcript.move_cursor(-1)
        assert transcript.marked.id == "m49"
        for _ in range(20):
            transcript.move_cursor(-1)
            await pilot.pause()
            top = transcript.stack.starts[transcript.cursor]
            assert transcript.scroll_y <= top < transcript.scroll_y + transcript.size.height
        assert transcript.marked.id == "m29"
        assert any(row.startswith("▌") for row in rows(transcript))


async def test_a_selection_copies_the_source_not_the_screen():
    async with showing(0, (40, 24)) as (pilot, transcript):
        text = "- a list item that is long enough to be wrapped over two rows\n- 日本語 two"
        transcript.show([TranscriptItem(message(1, text))])
        await pilot.pause()
        whole, _ = transcript.get_selection(Selection(Offset(0, 1), Offset(40, 3)))
        assert whole == "• a list item that is long enough to be wrapped over two rows\n• 日本語 two"
        part, _ = transcript.get_selection(Selection(Offset(4, 3), Offset(8, 3)))
        assert part == "日本"


@pytest.mark.parametrize("theme", ["textual-dark", "textual-light", "nord", "ansi-dark"])
async def test_selected_text_can_be_read(theme):
    async with showing(1) as (pilot, transcript):
        pilot.app.theme = theme
        await pilot.pause()
        strip = selected(transcript.render_line(0), transcript.screen)
        assert strip.text.strip()
        assert all(segment.style.color != segment.style.bgcolor for segment in strip if segment.text.strip())


async def test_an_empty_chat_draws_blank():
    async with showing(0) as (_, transcript):
        assert rows(transcript) == [""] * transcript.size.height
        assert transcript.marked is None
        transcript.move_cursor(-1)
