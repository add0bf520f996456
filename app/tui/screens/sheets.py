"""Models, settings, cache and help: the sheets over the main screen, and the model that the first start offers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from ..records import OverflowChoice
from ..refusals import ContextOverflowError
from ..service_records import Job, ModelOffer
from ..status_parts import kept_words
from .desk import Desk


class Sheets(Desk):
    default_model: str = ""
    """Name that a first start offers."""
    offer: ModelOffer | None = None
    first_job: Job | None = None
    """The download that the first start began."""

    def action_help(self) -> None:
        from .help import HelpScreen

        self.app.push_screen(HelpScreen(self.focused))

    def action_models(self) -> None:
        from .models import ModelsScreen

        self.app.push_screen(ModelsScreen(self.session, self.palette))

    def action_model_named(self, argument: str = "") -> None:
        if argument:
            self.do(self.load_model(argument))
        else:
            self.action_models()

    def action_cache(self) -> None:
        from .cache import CacheScreen

        def left(chat_id: str | None) -> None:
            if chat_id:
                self.open(chat_id)

        self.app.push_screen(CacheScreen(self.session, self.palette), left)

    def action_chat_settings(self) -> None:
        from .chat_settings import ChatSettingsScreen

        def chosen(fields: dict[str, object] | None) -> None:
            if fields and fields.pop("is_private", None) is not None:
                self.switch_private()
            if fields:
                self.do(self._update_chat(fields))

        conversation = self.session.conversation
        system = conversation.system if conversation else ""
        sampling = conversation.sampling if conversation else {}
        summary = self.session.summary
        screen = ChatSettingsScreen(
            summary.title if summary else "",
            system,
            sampling,
            summary.num_tokens if summary else 0,
            kept_words(self.session.cache.report),
            is_private=self.session.is_private,
            is_new=self.session.chat_id is None,
        )
        self.app.push_screen(screen, chosen)

    def switch_private(self) -> None:
        """A new chat becomes private, or is it no longer."""
        raise NotImplementedError

    def action_system_prompt(self, argument: str = "") -> None:
        if argument:
            self.do(self._update_chat({"system": argument}))
        else:
            self.action_chat_settings()

    def ask_about_overflow(
        self, error: ContextOverflowError, act: Callable[[OverflowChoice], Coroutine[Any, Any, None]]
    ) -> None:
        """Nothing was changed yet; `act` follows the person's choice, if one is made."""
        from .overflow import OverflowScreen

        def chosen(choice: OverflowChoice | None) -> None:
            if choice is not None:
                self.do(act(choice))

        self.app.push_screen(OverflowScreen(error, self.palette), chosen)

    def action_theme(self) -> None:
        self.app.search_themes()

    async def find_offer(self) -> None:
        """Which model a first start should offer: the default, else an installed one, else the first."""
        offers = [ModelOffer.from_json(model) for model in await self.session.service.list_models()]
        by_name = {offer.name: offer for offer in offers}
        installed = [offer for offer in offers if offer.is_installed]
        self.offer = by_name.get(self.default_model) or next(iter(installed or offers), None)
        self.show_first_run()

    async def begin_first_run(self) -> None:
        """Get the model that is offered, unless it comes already; without an offer, let the person choose."""
        if self.offer is None:
            await self.find_offer()
        if self.offer is None:
            self.action_models()
        elif self.offer.is_installed:
            await self.load_model(self.offer.name)
        elif self.first_job is None or self.first_job.state != "running":
            await self._pull(self.offer.name)

    def follow_jobs(self) -> None:
        """A finished first download is loaded at once: the person asked for the model, not for the file."""
        if self.first_job is None:
            running = [job for job in self.board.jobs.values() if job.state == "running"]
            self.first_job = running[0] if running and self.is_first_run else None
        if self.first_job is None:
            return
        before, self.first_job = self.first_job, self.board.jobs.get(self.first_job.id, self.first_job)
        if before.state == "running" and self.first_job.state == "done":
            if self.board.status.model.state in ("no_model", "failed"):
                self.do(self.load_model(self.first_job.name))
            self.do(self.find_offer())

    @property
    def is_first_run(self) -> bool:
        """No model is there to talk to: show the offer in place of the conversation's end."""
        return self.board.is_connected and self.board.status.model.state == "no_model"

    def show_first_run(self) -> None:
        raise NotImplementedError

    async def load_model(self, name: str) -> None:
        await self.session.service.load_model(name)

    async def cancel_first_run(self) -> None:
        if self.first_job is not None:
            await self.session.service.cancel_job(self.first_job.id)

    async def _pull(self, name: str) -> None:
        self.first_job = Job.from_json(await self.session.service.pull_model(name))
        self.board.jobs.setdefault(self.first_job.id, self.first_job)
        self.show_first_run()

    async def _update_chat(self, fields: dict[str, object]) -> None:
        await self.session.update_chat(fields)
        self.show_conversation(keep_position=True)
        self.say("Settings of this chat changed.")
