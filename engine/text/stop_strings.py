"""Finds stop strings in a text that comes in pieces, in time linear in the text whatever the stop strings are."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(slots=True)
class _State:
    """What was read last is the beginning of a stop string, `depth` characters long: the longest such suffix."""

    depth: int
    next: dict[str, int] = field(default_factory=dict)
    shorter: int = 0
    """The next longest suffix that is a beginning too."""
    match_length: int = 0
    """Length of the longest stop string that ends here, or 0."""


class StopMatcher:
    """An Aho-Corasick automaton (Aho and Corasick, 1975) and where it stands in one text.

    The stop string that ends first wins; of those that end together, the longest.
    """

    def __init__(self, stop: Sequence[str]):
        self._states = _build(tuple(sorted({text for text in stop if text})))
        self._state = 0

    @property
    def num_held(self) -> int:
        """Characters at the end of the text so far that may yet turn out to begin a stop string."""
        return self._states[self._state].depth

    def push(self, text: str) -> tuple[int, int] | None:
        """Reads on. (characters of `text` read, length of the match that ends there), or None without a match."""
        states, state = self._states, self._state
        if len(states) == 1:
            return None
        for index, char in enumerate(text):
            while char not in states[state].next and state:
                state = states[state].shorter
            state = states[state].next.get(char, 0)
            if states[state].match_length:
                self._state = state
                return index + 1, states[state].match_length
        self._state = state
        return None

    def forget(self) -> None:
        """What was read so far begins nothing."""
        self._state = 0


@lru_cache(maxsize=64)
def _build(stop: tuple[str, ...]) -> tuple[_State, ...]:
    states = [_State(0)]
    for text in stop:
        at = 0
        for char in text:
            if char not in states[at].next:
                states[at].next[char] = len(states)
                states.append(_State(states[at].depth + 1))
            at = states[at].next[char]
        states[at].match_length = len(text)
    waiting = deque(states[0].next.values())
    while waiting:  # Breadth first: shorter states are complete before longer ones lean on them.
        at = waiting.popleft()
        for char, child in states[at].next.items():
            shorter = states[at].shorter
            while char not in states[shorter].next and shorter:
                shorter = states[shorter].shorter
            states[child].shorter = states[shorter].next.get(char, 0)
            longest = states[states[child].shorter].match_length
            states[child].match_length = states[child].match_length or longest
            waiting.append(child)
    return tuple(states)
