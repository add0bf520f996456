"""The terminal app: one main screen over one session with the service."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import ClassVar

from textual.app import App, SystemCommand
from textual.screen import Screen

from .board import Board
from .commands import COMMANDS
from .drafts import Drafts
from .feed import read_events
from .ports import ChatService, UserError
from .screens.main import MainScreen
from .session import Session
from .theme import palette_of

WARM_UP_AFTER_S = 1.0


class ChatApp(App[int]):
    TITLE = "chatkv"
    PAUSE_GC_ON_SCROLL = True
    CSS = "ToastRack { dock: top; align: right top; margin: 1 0 0 0; }"
    COMMAND_PALETTE_BINDING: ClassVar[str] = "ctrl+p"

    def __init__(
        self,
        service: ChatService,
        *,
        state_dir: Path | None = None,
        default_model: str = "",
        theme: str = "textual-dark",
        is_ascii: bool = False,
    ):
        """`state_dir` holds drafts that no service took, and the clipboard's fallback file; None keeps neither."""
        super().__init__()
        self._service = service
        self._state_dir = state_dir
        self._default_model = default_model
        self._is_ascii = is_ascii
        self._wanted_theme = theme
        drafts = Drafts(state_dir / "unsaved-drafts.json" if state_dir else None)
        self.session = Session(service, Board(), drafts)
        self.main_screen: MainScreen | None = None

    def on_mount(self) -> None:
        if self._wanted_theme in self.available_themes:
            self.theme = self._wanted_theme
        palette = palette_of(self.current_theme, self._is_ascii)
        self.main_screen = MainScreen(self.session, palette, self._state_dir, self._default_model)
        self.push_screen(self.main_screen)
        self.theme_changed_signal.subscribe(self, lambda _: self._theme_changed())
        self.run_worker(
            read_events(self._service, self.session.board, self._say_trouble),
            group="feed",
            exclusive=True,
            exit_on_error=False,
        )
        self.set_timer(WARM_UP_AFTER_S, self._warm_up)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        main = self.main_screen
        if main is None or screen is not main:
            return
        for command in COMMANDS:
            action = getattr(main, f"action_{command.action}")
            title = f"/{command.name}" + (f"  ({command.key})" if command.key else "")
            yield SystemCommand(title, command.what, partial(action))

    async def action_quit(self) -> None:
        """Textual's own ^Q comes before the screen's."""
        if self.main_screen is not None:
            self.main_screen.action_quit()
        else:
            self.exit(0)

    def leave(self, status: int = 0) -> None:
        """End the app; what stands in the composer is kept."""
        if self.main_screen is not None and self.main_screen.is_mounted:
            self.main_screen.keep_composed()
        self.exit(status)

    async def close(self) -> None:
        """Save what was typed: with the service if it answers, else in a file. Called when the app has ended."""
        session = self.session

        await session.drafts.flush(session.write_draft)
        session.drafts.write_file()
        await self._service.close()

    def _theme_changed(self) -> None:
        if self.main_screen is not None and self.main_screen.is_mounted:
            self.main_screen.set_palette(palette_of(self.current_theme, self._is_ascii))

    def _say_trouble(self, error: UserError) -> None:
        self.notify(f"{error.message}\n{error.hint}".strip(), severity="error", timeout=15, markup=False)

    def _warm_up(self) -> None:
        """What the first answer would wait for is imported while nobody waits; then the objects so far are frozen."""
        self.run_worker(_import_renderers, thread=True, group="warm-up", exit_on_error=False)
        gc.collect()
        gc.freeze()


def _import_renderers() -> None:
    from .render.highlight import find_lexer
    from .render.inline import inline
    from .render.palette import Palette

    palette = Palette()
    inline("*warm*", palette.text, palette)
    find_lexer("python")
