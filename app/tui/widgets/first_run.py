"""Shown while no model is there: what one Enter will do, and then how far the download is."""

from __future__ import annotations

from rich.text import Text
from textual.widgets import Static

from ..render import format
from ..render.palette import Palette
from ..service_records import Job, ModelOffer, ModelState

BAR_CELLS = 24
STAGES = {"download": "Downloading", "verify": "Checking", "import": "Importing"}


class FirstRun(Static):
    def show(self, offer: ModelOffer | None, job: Job | None, model: ModelState, palette: Palette) -> None:
        self.update(first_run_text(offer, job, model, palette))


def first_run_text(offer: ModelOffer | None, job: Job | None, model: ModelState, palette: Palette) -> Text:
    text = Text(style=palette.text)
    if model.state == "loading":
        text.append("Loading ", palette.strong).append(model.name, palette.good)
        text.append(f"\n{format.gauge(model.progress, BAR_CELLS, palette.glyphs)} {100 * model.progress:.0f} %")
    elif job is not None and job.state == "running":
        text.append(f"{STAGES.get(job.stage, 'Preparing')} ", palette.strong).append(job.name, palette.good)
        text.append(f"\n{job_text(job, palette)}\n")
        text.append("You can write already: your message is sent when the model is there.  Esc cancels", palette.dim)
    else:
        if job is not None and job.state == "failed":
            text.append(f"The download failed: {job.error or 'no reason was given'}\n", palette.bad)
        text.append("No model is here yet.\n", palette.strong)
        if offer is None:
            text.append("F3 shows the models.", palette.dim)
        else:
            text.append(f"{offer.name}", palette.good)
            facts = [format.size(offer.download_bytes)] if offer.download_bytes else []
            facts += [offer.licence] if offer.licence else []
            facts += [f"{offer.context_tokens:,} tokens of context"] if offer.context_tokens else []
            text.append("".join(f" · {fact}" for fact in facts) + "\n", palette.text)
            action = "loads it" if offer.is_installed else "downloads it and starts"
            text.append("Enter", palette.strong).append(f" {action}   ").append("F3", palette.strong)
            text.append(" other models\n").append(
                "You can write already: Enter sends it when the model is there.", palette.dim
            )
    return text


def job_text(job: Job, palette: Palette, cells: int = BAR_CELLS) -> str:
    """`▓▓▓▓░░░░ 61 %  62/101 MB · 18 MB/s · 0:04`, or the stage where there are no bytes to count."""
    if not job.total_bytes:
        return job.message or job.stage or "starting"
    parts = [f"{format.size(job.done_bytes)} of {format.size(job.total_bytes)}"]
    if job.rate_bytes_s > 0 and job.stage == "download":
        rest_s = (job.total_bytes - job.done_bytes) / job.rate_bytes_s
        parts += [f"{format.size(job.rate_bytes_s)}/s", format.duration(rest_s)]
    elif job.stage and job.stage != "download":
        parts.insert(0, job.stage)
    return f"{format.gauge(job.share, cells, palette.glyphs)} {100 * job.share:.0f} %  {' · '.join(parts)}"
