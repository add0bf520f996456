"""The models: what is on disk, what can be had, downloads with their progress; load, cancel, remove."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from rich.style import Style
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
NAME_CELLS, STATE_CELLS, SIZE_CELLS = 18, 13, 8


class ModelsScreen(Sheet[None]):
    sheet_title = "Models"
    sheet_keys = "Enter loads or fetches · x cancels · d removes · / filter · Esc"
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
        """Name, state, size, context and licence; below, what it is for, or how far its download is."""
        palette, job = self._palette, self._job(offer)
        state, style = self._state(offer, job)
        num_bytes = offer.size_bytes or offer.download_bytes
        facts = [f"{format.tokens(offer.context_tokens)} context"] if offer.context_tokens else []
        facts += [offer.licence] if offer.licence else []
        head = Text.assemble(
            (f"{palette.glyphs.writing if self._is_current(offer) else ' '} ", palette.good),
            (fit(offer.name, NAME_CELLS), palette.strong),
            (fit(state, STATE_CELLS), style),
            (fit(format.size(num_bytes) if num_bytes else "", SIZE_CELLS), palette.dim),
            (" · ".join(facts), palette.dim),
        )
        room = max(20, self.query_one(OptionList).size.width - 3)
        head.truncate(room, overflow="ellipsis")
        below = job_text(job, palette, cells=12) if job else offer.description
        return head.append(f"\n    {shorten(below, room - 4)}", palette.warn if job else palette.dim)

    def _is_current(self, offer: ModelOffer) -> bool:
        model = self._session.board.status.model
        return offer.name == model.name and model.state in ("ready", "loading")

    def _state(self, offer: ModelOffer, job: Job | None) -> tuple[str, Style]:
        palette, model = self._palette, self._session.board.status.model
        if job is not None:
            return STAGES.get(job.stage, "Preparing").lower(), palette.warn
        if self._is_current(offer):
            if model.state == "loading":
                return f"loading {100 * model.progress:.0f} %", palette.warn
            return "loaded", palette.good
        if not offer.fits:
            return "does not fit", palette.bad
        return "on disk" if offer.is_installed else "to download", palette.text

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
