"""What the cache keeps, beside the conversation: under each chat of the list, in the gauges below it; and notices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text
from textual.widgets import Static

from ..render.chat_rows import ChatRow, kept_rows
from ..render.tier_lines import small_tier_lines
from ..widgets.notice import NoticeBar
from .warming import Warming

ASK_EVERY_S = 2.0
OTHER_VERSION = (
    "The running service is chatkv {}, this app is another version. /restart starts it anew; "
    "a reply that is being written stops, and can be continued."
)


class Keeping(Warming):
    kept: Mapping[str, Sequence[ChatRow]] = {}
    """The lines under the chats, by chat."""
    _seen_version = ""
    _version_notice: tuple[str, ...] = ()

    def watch_cache(self) -> None:
        """Ask what is kept, if it shows and something may have changed it."""
        if self.is_current and self.is_list_shown and self.session.cache.is_due:
            self.run_worker(self._ask_cache(), group="cache", exit_on_error=False)

    @property
    def is_list_shown(self) -> bool:
        is_beside = self.has_class("-wide") and not self.has_class("-list-hidden")
        return is_beside or self.has_class("-list-open")

    async def _ask_cache(self) -> None:
        if await self.session.cache.ask():
            self.show_kept()

    def show_kept(self) -> None:
        report, device = self.session.cache.report, self.board.status.device
        self.kept = kept_rows(report, device, self.palette)
        lines = [Text.assemble(*line) for line in small_tier_lines(report, device, self.palette)]
        self.query_one("#kept", Static).update(Text("\n").join(lines))
        self.show_list()

    # Notices

    def show_notices(self) -> None:
        status = self.board.status
        if status.version != self._seen_version:
            self._seen_version = status.version
            is_same = not status.version or self.session.service.is_same_version({"version": status.version})
            self._version_notice = () if is_same else (OTHER_VERSION.format(status.version),)
        self.query_one(NoticeBar).tell([*self._version_notice, *status.notices], self.palette)

    def action_put_away(self) -> None:
        self.query_one(NoticeBar).put_away(self.palette)

    def action_restart_service(self) -> None:
        self.say("Restarting the service.")
        self.do(self._restart())

    async def _restart(self) -> None:
        """The reader of the events meets its end, and starts the service again."""
        self.keep_composed()
        await self.session.drafts.flush(self.session.write_draft)
        if not await self.session.service.stop():
            self.say("The service has not ended yet; `chatkv status` tells what it does.", tone="warning")
