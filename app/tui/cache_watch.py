"""What the KV cache holds, fetched only while something changes it. No Textual."""

from __future__ import annotations

from .board import Board
from .cache_records import CacheReport
from .ports import ChatService, RefusedError, ServiceLostError


class CacheWatch:
    """The last report, and whether another one is worth asking for."""

    def __init__(self, service: ChatService, board: Board):
        self.report = CacheReport()
        self.trouble = ""
        """Why the last question was not answered."""
        self._service = service
        self._board = board
        self._num_seen_changes = 0
        self._is_settled = True
        """The last two reports were the same: blocks move to the disk for a while after the last event."""
        self._is_asking = False

    @property
    def is_due(self) -> bool:
        is_changed = self._board.num_cache_changes != self._num_seen_changes or not self._is_settled
        return is_changed and self._board.is_connected and not self._is_asking

    async def ask(self) -> bool:
        """Fetch the report; True when it is another one. Without an answer the last one stays."""
        self._is_asking = True
        self._num_seen_changes = self._board.num_cache_changes
        try:
            report = CacheReport.from_json(await self._service.cache())
        except (RefusedError, ServiceLostError) as error:
            self.trouble, self._is_settled = error.message, True
            return False
        finally:
            self._is_asking = False
        self.trouble = ""
        self._is_settled = report == self.report and not report.disk.num_queued
        is_new, self.report = report != self.report, report
        return is_new
