"""How many tokens a step may run so that it stays about as short as wanted."""

from __future__ import annotations

from .config import BLOCK_SIZE

NUM_TOKENS_UNMEASURED = 2 * BLOCK_SIZE
"""The first step's budget: slow machines read some 100 tokens a second."""
GROWTH_LIMIT = 2.0
"""One measurement at most doubles the rate: a lucky timing must not freeze the chats in the next step."""
SMOOTHING = 0.3
QUICK_SHARE = 0.25
"""Of the target: after so short a step, twice as many tokens are no risk."""


class TokenBudget:
    """Learns tokens per second from the steps that ran. A step far too long is believed at once, because another one
    would freeze every chat again; a fast one only gradually."""

    def __init__(self, max_num_tokens: int, target_step_s: float) -> None:
        self._max_num_tokens = max_num_tokens
        self._target_step_s = target_step_s
        self._tokens_per_s = NUM_TOKENS_UNMEASURED / target_step_s

    @property
    def num_tokens(self) -> int:
        """For the next step, decode tokens included. At least one block."""
        wanted = int(self._tokens_per_s * self._target_step_s + 0.5)
        return max(min(wanted, self._max_num_tokens), BLOCK_SIZE)

    def record(self, num_tokens: int, duration_s: float) -> None:
        """A step ran `num_tokens` tokens, prefill and decode together, in `duration_s`."""
        measured = min(num_tokens / max(duration_s, 1e-6), self._tokens_per_s * GROWTH_LIMIT)
        if duration_s > 1.5 * self._target_step_s:
            self._tokens_per_s = min(self._tokens_per_s, measured)
        elif 2 * num_tokens < self.num_tokens or duration_s < QUICK_SHARE * self._target_step_s:
            # A step of few rows pays for reading the weights all the same: its rate is a lower bound, no more.
            self._tokens_per_s = max(self._tokens_per_s, measured)
        else:
            self._tokens_per_s += SMOOTHING * (measured - self._tokens_per_s)
