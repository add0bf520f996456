"""The context is full: what can be done, and what it costs. Nothing happens without a choice."""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text
from textual import on
from textual.widget import Widget
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from ..records import OverflowChoice
from ..refusals import ContextOverflowError
from ..render import format
from ..render.palette import Palette
from .sheet import Sheet


class OverflowScreen(Sheet[OverflowChoice]):
    sheet_title = "The context is full"
    sheet_keys = "Enter chooses · Esc sends nothing, the text stays in the composer"

    def __init__(self, error: ContextOverflowError, palette: Palette):
        super().__init__()
        if not error.choices:
            self.sheet_keys = "Esc closes, the text stays in the composer"
        self._error = error
        self._palette = palette

    def contents(self) -> Iterable[Widget]:
        error = self._error
        yield Static(
            f"With this message the model would have to read {error.num_prompt_tokens:,} tokens; "
            f"it holds {error.context_tokens:,}.",
            id="body-text",
            markup=False,
        )
        if error.choices:
            yield OptionList(*(Option(self._label(choice)) for choice in error.choices))
        else:
            yield Static(
                "It does not fit without the earlier turns either: shorten it, or load a model that holds more (F3).",
                classes="advice",
            )

    def _label(self, choice: OverflowChoice) -> Text:
        turns = "turn" if choice.num_turns == 1 else "turns"
        cost = f"{format.tokens(choice.num_tokens_after)} tokens are read again"
        if choice.kind == "drop_oldest":
            words = f"Leave out the oldest {choice.num_turns} {turns}"
        else:
            words = f"Fork, and leave out the oldest {choice.num_turns} {turns} there; this chat stays whole"
        return Text.assemble(
            (words, self._palette.strong), (f"\n  {cost}; the text of all turns is kept", self._palette.dim)
        )

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._error.choices[event.option_index])
