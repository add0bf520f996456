"""What is made of a prompt before the engine's thread sees it: long prompts take milliseconds, and no step waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from .block_hash import MAX_TOKEN_ID, BlockHasher, pack_ids, salt_extra
from .config import BLOCK_SIZE
from .errors import InvalidRequestError, PromptTooLongError
from .request import GenerationRequest, Priority


class PreparedPrompt(NamedTuple):
    packed_ids: bytes
    """All ids of the prompt, u32 little endian."""
    block_hashes: list[bytes]
    """Of its full blocks."""


def check_prompt(token_ids: Sequence[int], max_context_tokens: int) -> None:
    """Raises InvalidRequestError or PromptTooLongError for what can never run."""
    if not token_ids:
        raise InvalidRequestError("the prompt is empty; it must have at least one token", "messages")
    if len(token_ids) >= max_context_tokens:
        raise PromptTooLongError(len(token_ids), max_context_tokens)
    if min(token_ids) < 0 or max(token_ids) > MAX_TOKEN_ID:
        raise InvalidRequestError("the prompt has token ids outside of 0 .. 2**32 - 1", "prompt")


def prepare_prompt(hasher: BlockHasher, request: GenerationRequest) -> PreparedPrompt:
    packed_ids = pack_ids(request.prompt_token_ids)
    return PreparedPrompt(packed_ids, hasher.chain(packed_ids, salt_extra(request.cache_salt)))


def as_background_work(request: GenerationRequest) -> GenerationRequest:
    """A warm request in the form in which it runs: full blocks only, one choice, behind everybody."""
    num_tokens = len(request.prompt_token_ids) // BLOCK_SIZE * BLOCK_SIZE
    return replace(request, prompt_token_ids=request.prompt_token_ids[:num_tokens], n=1, priority=Priority.BACKGROUND)
