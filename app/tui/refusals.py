"""What the service does not take, and what that means for a turn."""

from __future__ import annotations

from .ports import RefusedError
from .records import OverflowChoice

OVERFLOW_CODE = "context_length_exceeded"
PASSING_CODES = frozenset({"chat_busy", "queue_full", "stopping"})
"""Refusals that pass by themselves: the turn waits in the queue."""


class ContextOverflowError(Exception):
    """The conversation does not fit the model's context; the person has to choose."""

    def __init__(self, error: RefusedError):
        super().__init__(error.message)
        self.num_prompt_tokens = int(error.details.get("n_prompt_tokens") or 0)
        self.context_tokens = int(error.details.get("n_ctx") or 0)
        self.choices = [OverflowChoice.from_json(choice) for choice in error.details.get("choices") or ()]


class QueuedTurnRefusedError(Exception):
    """The service does not take a turn that waited."""

    def __init__(self, chat_id: str, text: str, refusal: RefusedError):
        super().__init__(refusal.message)
        self.chat_id = chat_id
        self.text = text
        self.refusal = refusal
