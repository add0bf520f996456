"""Load what lower tiers hold of a prompt, or compute it? Decided from what this machine was measured to do.

Reading n tokens of a prompt costs sum(a + b * position): each token goes through the weights (a) and looks back at all
tokens before it (b). Both come from a line fitted through the latest prefill steps, old ones fading out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..block_tree import BlockNode
from ..config import BLOCK_SIZE
from ..request import LoadDecision

LATENCY_S = 0.005
"""Of a load that reads nothing."""
FADING = 0.98
"""Weight of a step after the next one."""
MIN_SPREAD_TOKENS = 64.0
"""Steps must differ that much in position before a slope is believed."""


@dataclass(slots=True)
class PrefillCost:
    """Seconds per token as a line over the position, fitted by weighted least squares: weighted sums of the steps'
    mean position x and seconds per token y."""

    weight: float = 0.0
    sum_x: float = 0.0
    sum_y: float = 0.0
    sum_xx: float = 0.0
    sum_xy: float = 0.0

    def record(self, num_tokens: int, mean_position: float, duration_s: float) -> None:
        """A step read `num_tokens` tokens of prompts, and did little else."""
        for name in ("weight", "sum_x", "sum_y", "sum_xx", "sum_xy"):
            setattr(self, name, getattr(self, name) * FADING)
        seconds_per_token = duration_s / num_tokens
        self.weight += num_tokens
        self.sum_x += num_tokens * mean_position
        self.sum_y += num_tokens * seconds_per_token
        self.sum_xx += num_tokens * mean_position**2
        self.sum_xy += num_tokens * mean_position * seconds_per_token

    def line(self) -> tuple[float, float]:
        """(a, b): seconds per token at position 0, and seconds per token and position."""
        if self.weight <= 0:
            return 0.0, 0.0
        mean_x, mean_y = self.sum_x / self.weight, self.sum_y / self.weight
        variance = self.sum_xx / self.weight - mean_x**2
        if variance < MIN_SPREAD_TOKENS**2:
            return mean_y, 0.0
        slope = (self.sum_xy / self.weight - mean_x * mean_y) / variance
        slope = min(max(slope, 0.0), mean_y / mean_x)
        return mean_y - slope * mean_x, slope

    def seconds(self, start: int, stop: int) -> float:
        """To compute the tokens start .. stop - 1 behind those before them; 0 while nothing was measured."""
        a, b = self.line()
        num_tokens = max(stop - start, 0)
        return num_tokens * (a + b * (start + stop - 1) / 2)


class LoadPlanner:
    """`read_rate`: bytes a second of a tier, 0 while unknown. `image_bytes`: of one block."""

    def __init__(
        self, read_rate: Callable[[str], float], image_bytes: int, constants: Mapping[str, float] | None = None
    ) -> None:
        self._read_rate = read_rate
        self._image_bytes = image_bytes
        self._cost = PrefillCost(**constants) if constants else PrefillCost()

    @property
    def constants(self) -> dict[str, float]:
        """What was measured, to start the next engine of the same model with."""
        names = ("weight", "sum_x", "sum_y", "sum_xx", "sum_xy")
        return {name: getattr(self._cost, name) for name in names}

    def record_step(self, num_tokens: int, mean_position: float, duration_s: float) -> None:
        self._cost.record(num_tokens, mean_position, duration_s)

    def decide(self, nodes: Sequence[BlockNode]) -> LoadDecision:
        """`nodes`: a piece of a chain that lower tiers hold. What is not known yet speaks for loading."""
        first = nodes[0].position * BLOCK_SIZE
        num_tokens = len(nodes) * BLOCK_SIZE
        load_s = self.load_s(nodes)
        compute_s = self.compute_s(first, first + num_tokens)
        is_loaded = load_s is None or compute_s is None or load_s <= compute_s
        return LoadDecision(num_tokens, load_s or 0.0, compute_s or 0.0, is_loaded)

    def load_s(self, nodes: Sequence[BlockNode]) -> float | None:
        """None: a tier's rate is not known yet."""
        num_by_tier: dict[str, int] = {}
        for node in nodes:
            if node.place in ("host", "disk"):
                num_by_tier[node.place] = num_by_tier.get(node.place, 0) + 1
        seconds = LATENCY_S if num_by_tier else 0.0
        for name, num_blocks in num_by_tier.items():
            rate = self._read_rate(name)
            if rate <= 0:
                return None
            seconds += num_blocks * self._image_bytes / rate
        return seconds

    def compute_s(self, start: int, stop: int) -> float | None:
        """None: nothing was measured yet."""
        return self._cost.seconds(start, stop) if self._cost.weight > 0 else None
