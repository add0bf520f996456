"""System prompt and sampling of one chat. Empty fields leave the model's defaults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Checkbox, Input, Static, TextArea

from ..render import format
from .sheet import Sheet


class Knob(NamedTuple):
    name: str
    label: str
    low: float
    high: float
    is_whole: bool
    note: str


KNOBS = (
    Knob("temperature", "temperature", 0, 2, False, "0: always the likeliest token"),
    Knob("top_p", "top-p", 0, 1, False, "1: off"),
    Knob("top_k", "top-k", 0, 1_000_000, True, "0: off"),
    Knob("min_p", "min-p", 0, 1, False, "0: off"),
    Knob("repetition_penalty", "repetition penalty", 0.01, 10, False, "1: off"),
    Knob("max_tokens", "longest reply", 1, 1_000_000, True, "in tokens"),
    Knob("seed", "seed", 0, 2**63 - 1, True, "same seed, same reply"),
)


class PlainCheckbox(Checkbox):
    """Textual's tells on from off by colour alone."""

    def render(self) -> Content:
        self.BUTTON_INNER = "X" if self.value else " "
        return super().render()


class ChatSettingsScreen(Sheet[dict[str, object]]):
    sheet_title = "This chat"
    sheet_keys = "Ctrl+J or F2 saves · Tab next field · Esc leaves"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("f2,ctrl+j", "save", "Save", show=False, id="settings.save")]

    def __init__(
        self,
        title: str,
        system: str,
        sampling: Mapping[str, Any],
        num_tokens: int,
        kept: str,
        *,
        is_private: bool,
        is_new: bool,
    ):
        """`kept`: where its KV is kept unless it is private, in words; only of a new chat that can be chosen."""
        super().__init__()
        self._kept = kept
        self._is_private = is_private
        self._is_new = is_new
        self._title_before = title
        self._system = system
        self._sampling = dict(sampling)
        self._num_tokens = num_tokens

    def contents(self) -> Iterable[Widget]:
        with VerticalScroll() as scroll:
            scroll.can_focus = False
            yield Horizontal(
                Static("title"),
                Input(self._title_before, placeholder="named by its first words", id="title"),
                classes="row -whole",
            )
            yield Horizontal(Static("keep KV"), self._keeping(), classes="row -whole")
            cost = f" · a change reads all {format.tokens(self._num_tokens)} tokens again" if self._num_tokens else ""
            yield Static(f"system prompt{cost}", classes="label", markup=False)
            yield TextArea(self._system, id="system", tab_behavior="focus", compact=True, highlight_cursor_line=False)
            yield Static("sampling · free to change, nothing is read again", classes="label")
            for knob in KNOBS:
                yield self._row(knob)
        yield Static("", id="error", classes="error", markup=False)

    def _keeping(self) -> Widget:
        private = "private: nothing of it is kept when the service ends"
        if self._is_new:
            return PlainCheckbox(private, self._is_private, id="private", compact=True)
        return Static(private if self._is_private else self._kept, id="kept", markup=False)

    def _row(self, knob: Knob) -> Widget:
        value = self._sampling.get(knob.name)
        shown = "" if value is None else str(value) if knob.is_whole else f"{value:g}"
        return Horizontal(
            Static(knob.label, markup=False),
            Input(shown, id=knob.name, placeholder="default"),
            Static(knob.note, classes="note", markup=False),
            classes="row",
        )

    def action_save(self) -> None:
        sampling: dict[str, float | int] = {}
        for knob in KNOBS:
            field = self.query_one(f"#{knob.name}", Input)
            value, complaint = read_knob(knob, field.value)
            if complaint:
                self.query_one("#error", Static).update(complaint)
                field.focus()
                return
            if value is not None:
                sampling[knob.name] = value
        system = self.query_one("#system", TextArea).text
        title = self.query_one("#title", Input).value.strip()
        changed: dict[str, object] = {}
        if system != self._system:
            changed["system"] = system
        if sampling != self._sampling:
            changed["sampling"] = sampling
        if title and title != self._title_before:
            changed["title"] = title
        if self._is_new and self.query_one("#private", Checkbox).value != self._is_private:
            changed["is_private"] = not self._is_private
        self.dismiss(changed)


def read_knob(knob: Knob, text: str) -> tuple[float | int | None, str]:
    """The value (None: the default) and what is wrong with it, if anything."""
    text = text.strip().replace(",", ".")
    if not text:
        return None, ""
    try:
        value: float | int = int(text) if knob.is_whole else float(text)
    except ValueError:
        kind = "a whole number" if knob.is_whole else "a number"
        return None, f"{knob.label}: “{text}” is not {kind}."
    if not knob.low <= value <= knob.high:
        return None, f"{knob.label}: between {knob.low:g} and {knob.high:g}, or empty for the default."
    return value, ""
