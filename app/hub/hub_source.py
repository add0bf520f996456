"""Weights from the Hugging Face hub, or what HF_ENDPOINT names. Token, proxies, certificates, offline mode and the
shared cache are huggingface-hub's; the streaming is ours, because huggingface-hub keeps no partial file between runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from .deadline import within
from .hub_stream import stream_file
from .reports import SourceFailed
from .sources import Fetched, FetchJob
from .specs import HubSpec

_WHO = "the hub"
_TOKEN = "log in with `hf auth login`, or set HF_TOKEN and restart the service with `chatkv stop`"
"""The service downloads; it knows the environment that it was started in."""
_SMALL_FILES = frozenset(
    {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "tokenizer.model",
        "chat_template.jinja",
        "chat_template.json",
        "model.safetensors.index.json",
    }
)


@dataclass(frozen=True)
class RemoteFile:
    name: str
    url: str
    size: int
    etag: str
    sha256: str | None


def fetch_from_hub(spec: HubSpec, job: FetchJob) -> Fetched:
    """Download the file, or the repository's weights and tokenizer. See `sources.fetch` for the errors."""
    try:
        if not spec.file:
            return _fetch_repository(spec, job)
        if (cached := _in_shared_cache(spec)) is not None:
            return Fetched(cached, is_ours=False)
        remote = within(job.reach_timeout_s, lambda: _describe(spec, spec.file, job), job.is_cancelled, _WHO)
        job.on_size(remote.size, remote.size)
        file = stream_file(remote, job)
        return Fetched(file, {file: remote.sha256} if remote.sha256 else {})
    except (HTTPError, OfflineModeIsEnabled, EntryNotFoundError, FileMetadataError, HFValidationError) as error:
        raise SourceFailed(reason_of(error, spec)) from error


def _in_shared_cache(spec: HubSpec) -> Path | None:
    """The file in huggingface-hub's own cache: for a pinned commit always right, else good enough when offline."""
    is_pinned = len(spec.revision) == 40
    if not (is_pinned or constants.HF_HUB_OFFLINE):
        return None
    found = huggingface_hub.try_to_load_from_cache(spec.repo, spec.file, revision=spec.revision)
    return Path(found) if isinstance(found, str) else None


def _describe(spec: HubSpec, file: str, job: FetchJob) -> RemoteFile:
    url = huggingface_hub.hf_hub_url(spec.repo, file, revision=spec.revision, endpoint=constants.ENDPOINT)
    facts = huggingface_hub.get_hf_file_metadata(url, timeout=job.reach_timeout_s)
    if facts.etag is None:
        raise SourceFailed(f"{constants.ENDPOINT} does not answer like a Hugging Face hub (no ETag for {file})")
    is_sha256 = len(facts.etag) == 64 and all(digit in "0123456789abcdef" for digit in facts.etag)
    return RemoteFile(Path(file).name, url, facts.size or 0, facts.etag, facts.etag if is_sha256 else None)


def _fetch_repository(spec: HubSpec, job: FetchJob) -> Fetched:
    """A directory as `transformers` would see it: config, tokenizer, safetensors."""
    api = huggingface_hub.HfApi(endpoint=constants.ENDPOINT)

    def ask() -> Any:
        return api.model_info(
            spec.repo, revision=spec.revision, files_metadata=True, timeout=job.reach_timeout_s
        ).siblings

    siblings = within(job.reach_timeout_s, ask, job.is_cancelled, _WHO) or []
    chosen = _choose([sibling.rfilename for sibling in siblings], spec)
    remotes = [_remote(spec, sibling) for sibling in siblings if sibling.rfilename in chosen]
    total = sum(remote.size for remote in remotes)
    job.on_size(total, total)
    job = replace(job, folder=job.folder / "repository")
    job.folder.mkdir(exist_ok=True)
    done, hashes = 0, {}
    for remote in remotes:
        file = stream_file(remote, job, already=done, total=total)
        done += remote.size
        if remote.sha256:
            hashes[file] = remote.sha256
    return Fetched(job.folder, hashes)


def _choose(names: list[str], spec: HubSpec) -> set[str]:
    weights = {name for name in names if "/" not in name and name.endswith(".safetensors")}
    if any(name.startswith("model") for name in weights):
        weights = {name for name in weights if name.startswith("model")}
    if not weights:
        ggufs = [name for name in names if name.endswith(".gguf")]
        some = "; it has " + ", ".join(ggufs[:6]) if ggufs else ""
        raise SourceFailed(f"the repository {spec.repo} has no safetensors{some}. Name one file: hf:{spec.repo}/FILE")
    return weights | (_SMALL_FILES & set(names))


def _remote(spec: HubSpec, sibling: Any) -> RemoteFile:
    url = huggingface_hub.hf_hub_url(spec.repo, sibling.rfilename, revision=spec.revision, endpoint=constants.ENDPOINT)
    sha256 = sibling.lfs.sha256 if sibling.lfs else None
    return RemoteFile(sibling.rfilename, url, sibling.size or 0, sha256 or sibling.blob_id or "", sha256)


def reason_of(error: Exception, spec: HubSpec) -> str:
    """Why the hub did not deliver, in one line, with what a person can do about it."""
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set and the file is not in the shared cache"
    if isinstance(error, GatedRepoError):
        return f"{spec.repo} asks you to accept its terms on its page; then {_TOKEN}"
    if isinstance(error, RepositoryNotFoundError):
        return f"there is no repository {spec.repo}, or it is private (then {_TOKEN})"
    if isinstance(error, RevisionNotFoundError):
        return f"{spec.repo} has no revision {spec.revision}"
    if isinstance(error, EntryNotFoundError):
        return f"{spec.repo} has no file {spec.file}"
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        return f"{constants.ENDPOINT} answered with status {error.response.status_code}"
    if isinstance(error, FileMetadataError | HFValidationError):
        return f"{constants.ENDPOINT} did not describe the file as a hub does ({error})"
    return f"{constants.ENDPOINT} cannot be reached ({str(error) or type(error).__name__})"
