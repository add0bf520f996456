"""The service's parts, put together once, and how they start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from chatkv.app.chats.blocks import ChatChain
from chatkv.app.chats.errors import ChatNotFoundError
from chatkv.app.chats.records import ChatSummary
from chatkv.app.chats.store import ChatStore
from chatkv.app.errors import UserError
from chatkv.app.hub.jobs import JobRunner
from chatkv.app.paths import Paths
from chatkv.app.settings import Settings
from chatkv.engine.errors import EngineError

from .activity import Activity
from .cache_view import MAX_CHATS, ShownChat, cache_report, short_tiers
from .chat_prompt import PromptMaker
from .chats_thread import ChatsThread
from .errors import ApiError
from .events import EventHub
from .forks import Forks
from .generations import Generations
from .job_events import JobEvents
from .kv_cache import KvCache
from .kv_store import KvStore
from .last_model import LastModel
from .loaded import LoadedModel, Loader
from .metrics import Metrics
from .model_choice import Installed
from .model_manager import ModelManager
from .model_state import ModelState
from .owners import Owners
from .replies import Replies
from .reuse import RequestLog
from .store_port import Hooks
from .wakeup import Wakeup
from .warming import Warmer

log = logging.getLogger(__name__)
NUM_TEXT_THREADS = 2
KEEP_ALIVE_S = 10.0
STOP_TIMEOUT_S = 3.0
STATUS_INTERVAL_S = 0.5


@dataclass(slots=True)
class Endpoints:
    """Where the service listens."""

    socket: str
    url: str | None = None
    """None: TCP is off."""
    tcp_error: str | None = None
    """Why, when it should be on."""


class Service:
    """Everything that outlives one request. Made and used on the event loop."""

    def __init__(
        self,
        paths: Paths,
        settings: Settings,
        installed: Installed,
        loader: Loader,
        endpoints: Endpoints,
        kv_store: KvStore,
        keep_alive_s: float = KEEP_ALIVE_S,
    ):
        """`loader` takes a model's disk tier from `kv_store`."""
        self.paths = paths
        self.settings = settings
        self.installed = installed
        self.endpoints = endpoints
        self.keep_alive_s = keep_alive_s
        self.started_at = time.monotonic()
        self.stop_wanted = asyncio.Event()
        self._stirred = Wakeup()
        self.activity = Activity(self._stirred.set)
        self.events = EventHub(self._stirred.set)
        self.text_pool = ThreadPoolExecutor(NUM_TEXT_THREADS, "text")
        self.chats = ChatsThread(paths.chats_db)
        self.kv_store = kv_store
        self.owners = Owners(self.chats)
        self.models = ModelManager(
            installed, loader, settings, LastModel(paths.last_model_file), on_change=self._publish_model
        )
        self.generations = Generations(self.models, self.text_pool)
        self.requests = RequestLog(count=lambda tier, num: self._in_pool(lambda: kv_store.count(tier, num)))
        prompts = PromptMaker(self.chats, self.models, self.text_pool)
        self.warmer = Warmer(self.chats, self.models, prompts, self.owners, self.requests, self.text_pool)
        self.replies = Replies(
            self.chats,
            self.models,
            self.generations,
            self.events,
            prompts,
            self.text_pool,
            self.owners,
            self.warmer,
            self.requests,
        )
        self.forks = Forks(self.chats, self.models, prompts, self.owners)
        self.cache = KvCache(kv_store, self.chats, self.models, installed, self.warmer, self.requests)
        self.jobs = JobRunner(paths, JobEvents(asyncio.get_running_loop(), self.events, self._on_pulled))
        self.metrics = Metrics(self)
        self._ticker: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self._tidy_notice: str | None = None
        self._attached: LoadedModel | None = None
        """The model that has heard of the pinned chats."""

    def start(self) -> None:
        self.kv_store.start(Hooks(self.owners.on_owned, self.owners.pinned_in, self.owners.owners_id))
        self.models.start()
        self._ticker = asyncio.create_task(self._tick())
        self.spawn(self._tidy())

    async def _tidy(self) -> None:
        """What was deleted leaves: the blocks first, which only a chat that is still known can name."""
        await self.cache.forget_trashed()
        try:
            await self.chats.run(lambda store: store.purge_expired())
        except UserError as error:
            log.warning("the trash is not emptied: %s", error.message)
            self._tidy_notice = (
                f"Chats that were deleted 30 days ago may still have traces in {self.paths.chats_db}: {error.message} "
                "The next start tries it again."
            )

    async def stop(self) -> None:
        """Replies are closed as "stopped", requests cancelled, the model freed, what it held made safe, the database
        closed; in this order."""
        if self._ticker is not None:
            self._ticker.cancel()
        await self.replies.stop_all()
        await self.generations.stop(STOP_TIMEOUT_S)
        await self.warmer.stop()
        self.events.close()
        await asyncio.to_thread(self.jobs.close)
        await self.models.close()
        await asyncio.to_thread(self.kv_store.close)  # Its last blocks still need the chat database.
        await self.chats.close()
        self.text_pool.shutdown(wait=False, cancel_futures=True)

    def spawn(self, work: Any) -> None:
        """Run a coroutine that nobody waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def status(self) -> dict[str, Any]:
        model = self.models.loaded
        stats = model.engine.stats() if model else None
        return {
            "version": version("chatkv"),
            "pid": os.getpid(),
            "socket": self.endpoints.socket,
            "url": self.endpoints.url,
            "tcp_error": self.endpoints.tcp_error,
            "key_file": None if self.settings.no_key else str(self.paths.key_file),
            "home": {
                "config": str(self.paths.config_dir),
                "data": str(self.paths.data_dir),
                "cache": str(self.paths.cache_dir),
                "state": str(self.paths.state_dir),
                "models": str(self.paths.models_dir),
            },
            "device": model.device if model else "cpu",
            "uptime_s": round(time.monotonic() - self.started_at, 1),
            "model": self.models.status(),
            "tiers": short_tiers(model, self.kv_store),
            "num_running": stats.num_running if stats else 0,
            "num_waiting": stats.num_waiting if stats else 0,
            "batch_size": stats.batch_size if stats else 0,
            "kv_usage": round(stats.kv_usage, 4) if stats else 0.0,
            "unused_slot_share": round(stats.unused_slot_share, 4) if stats else 0.0,
            "notice": self.chats.notice,
            "notices": self.notices,
            "settings_file": str(self.paths.settings_file),
            "log_file": str(self.paths.log_file),
        }

    @property
    def notices(self) -> list[str]:
        """What a person should know, of the chats, of the cache, and of the device."""
        loaded = self.models.loaded
        disk = short_tiers(loaded, self.kv_store)["disk"]
        place = loaded.place.notice if loaded else ""
        return [notice for notice in (self.chats.notice, self._tidy_notice, disk["notice"], place) if notice]

    async def cache_report(self) -> dict[str, Any]:
        """The answer of `/chatkv/cache`."""
        model, model_state = self.models.loaded, self.models.state.value
        fingerprint = model.fingerprint if model else b""

        def read(store: ChatStore) -> list[tuple[ChatChain, ChatSummary]]:
            found: list[tuple[ChatChain, ChatSummary]] = []
            for chain in store.chains(fingerprint, MAX_CHATS):
                with contextlib.suppress(ChatNotFoundError):
                    found.append((chain, store.get_chat(chain.chat_id)))
            return found

        shown = [
            ShownChat(summary, chain, self.replies.state(summary.id) != "idle" or self.warmer.is_warming(summary.id))
            for chain, summary in (await self.chats.run(read) if model else [])
            if not summary.in_trash
        ]

        def make() -> dict[str, Any]:
            self.kv_store.refresh()
            return cache_report(
                model, model_state, self.kv_store, shown, self.kv_store.tokens_24h(), self.cache.damaged
            )

        return await asyncio.get_running_loop().run_in_executor(self.text_pool, make)

    async def refresh(self) -> None:
        """What `status` tells of the disk is as of now."""
        await asyncio.to_thread(self.kv_store.refresh)

    def _in_pool(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # The service ends.
            self.text_pool.submit(work)

    def _publish_model(self) -> None:
        self._stirred.set()
        self.events.publish("model", model=self.models.status())
        model = self.models.loaded
        if model is not None and model is not self._attached:
            self.spawn(self.cache.pin_all(model))
            self.spawn(self.forks.share())
        self._attached = model

    def _on_pulled(self, name: str) -> None:
        """The first model is loaded as soon as it is there, and so is one that comes in place of a broken one."""
        if self.models.state in (ModelState.NO_MODEL, ModelState.FAILED):
            with contextlib.suppress(ApiError, EngineError):
                self.models.load_soon(name)

    @property
    def is_working(self) -> bool:
        is_pulling = any(job.state == "running" for job in self.jobs.list_jobs())
        return self.generations.num_running > 0 or is_pulling or self.models.state is ModelState.LOADING

    def _idle_left_s(self) -> float | None:
        """Until something is due if nobody comes. None: nothing ever."""
        due_s = []
        if self.settings.idle_exit_s > 0:
            due_s.append(self.settings.idle_exit_s - self.activity.idle_s(self.is_working))
        if self.settings.idle_unload_s and (left_s := self.models.idle_left_s(self.settings.idle_unload_s)) is not None:
            due_s.append(left_s)
        return max(0.0, min(due_s)) if due_s else None

    async def _tick(self) -> None:
        """Status events while somebody watches and something changes; the end when nobody came for long. Sleeps while
        nothing can have changed: an idle service takes no processor time."""
        last: dict[str, Any] = {}
        while True:
            await asyncio.sleep(STATUS_INTERVAL_S)
            if not (self.events.num_subscribers or self.activity.is_open or self.is_working):
                await self._stirred.wait(self._idle_left_s())
            if 0 < self.settings.idle_exit_s < self.activity.idle_s(self.is_working):
                log.info("nobody used the service for %.0f s: it ends", self.settings.idle_exit_s)
                self.stop_wanted.set()
            if self.settings.idle_unload_s:
                self.spawn(self.models.unload_if_idle(self.settings.idle_unload_s))
            if not self.events.num_subscribers:
                continue
            await self.refresh()
            status = self.status()
            changing = {name: value for name, value in status.items() if name != "uptime_s"}
            if changing != last:
                last = changing
                self.events.publish("status", status=status)
