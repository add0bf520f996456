"""What is made of a prompt before the engine's thread sees it: long prompts take milliseconds, and no step waits."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from .block_hash import BlockHasher, pack_ids, salt_extra
from .config import BLOCK_SIZE
from .request import GenerationRequest, Priority


class PreparedPrompt(NamedTuple):
    packed_ids: bytes
    """All ids of the prompt, u32 little endian."""
    block_hashes: list[bytes]
    """Of its full blocks."""


def prepare_prompt(hasher: BlockHasher, request: GenerationRequest) -> PreparedPrompt:
    packed_ids = pack_ids(request.prompt_token_ids)
    return PreparedPrompt(packed_ids, hasher.chain(packed_ids, salt_extra(request.cache_salt)))


def as_background_work(request: GenerationRequest) -> GenerationRequest:
    """A warm request in the form in which it runs: full blocks only, one choice, behind everybody."""
    num_tokens = len(request.prompt_token_ids) // BLOCK_SIZE * BLOCK_SIZE
    return replace(request, prompt_token_ids=request.prompt_token_ids[:num_tokens], n=1, priority=Priority.BACKGROUND)
