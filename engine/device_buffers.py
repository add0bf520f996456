"""What a card needs beside weights and pool: the largest step's numbers, its draws, captured steps, copies on the way.

Bounds, not measurements: a step that is as large as it may be takes no more than these.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import BLOCK_SIZE
from .models.config import ModelConfig

COMPUTE_BYTES = 2
"""float16 or bfloat16."""
FLOAT32_BYTES = 4
SPLIT_TOKENS = 512
"""Positions of a context that one program of decode attention looks at."""
GRAPH_SIZES = (1, 2, 4, 8, 16)
"""Rows of captured decode steps."""
FIRST_GRAPH_TOKENS = 2048
"""Context of the shortest captured steps; there are more, each for four times as much, up to the whole context."""
LAUNCHES_PER_LAYER = 12
LAUNCH_BYTES = 4 << 10
"""What CUDA keeps of a captured launch."""
GRAPH_BYTES = 2 << 20
"""... and of a captured step beside its launches."""
GRAPH_POOL_BYTES = 32 << 20
"""Unused ends of the pieces that captured steps share."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """Limits of a step, as `EngineConfig` has them."""

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_copy_bytes: int = 32 << 20

    def num_bytes(self, config: ModelConfig, max_context_tokens: int) -> int:
        return (
            self.activation_bytes(config)
            + self.sampling_bytes(config)
            + self.attention_bytes(config, max_context_tokens)
            + self.angle_bytes(config, max_context_tokens)
            + self.graph_bytes(config, max_context_tokens)
            + 2 * self.max_copy_bytes
        )

    def activation_bytes(self, config: ModelConfig) -> int:
        return self.max_num_batched_tokens * row_bytes(config)

    def sampling_bytes(self, config: ModelConfig) -> int:
        """Logits as they are and as they are drawn from, in float32; once more in between; and a grammar's bits."""
        return self.max_num_seqs * (config.vocab_size * (3 * FLOAT32_BYTES + COMPUTE_BYTES) + config.vocab_size // 8)

    def attention_bytes(self, config: ModelConfig, max_context_tokens: int) -> int:
        """Of each split of each sequence: a weighted sum, its largest score and its weight, in float32."""
        return self.max_num_seqs * _split_bytes(config, max_context_tokens)

    def angle_bytes(self, config: ModelConfig, max_context_tokens: int) -> int:
        """cos and sin of every position and pair of dimensions."""
        return max_context_tokens * config.head_dim * FLOAT32_BYTES

    def graph_bytes(self, config: ModelConfig, max_context_tokens: int) -> int:
        num_graphs = len(GRAPH_SIZES) * num_graph_contexts(max_context_tokens)
        kept = num_graphs * (GRAPH_BYTES + config.num_layers * LAUNCHES_PER_LAYER * LAUNCH_BYTES)
        row = row_bytes(config) + config.vocab_size * FLOAT32_BYTES + _split_bytes(config, max_context_tokens)
        return kept + GRAPH_SIZES[-1] * row + GRAPH_POOL_BYTES


def row_bytes(config: ModelConfig) -> int:
    """Of one token in a step: hidden numbers in float32, and in the compute dtype the normed ones, a product to be
    added, q, k and v, what attention gives, gate and up, and their product; and once more the widest in 8 bits."""
    hidden, inner = config.hidden_size, config.intermediate_size
    attended = config.num_heads * config.head_dim
    heads = attended + 2 * config.num_kv_heads * config.head_dim
    computed = 2 * hidden + heads + attended + 2 * inner + inner
    return FLOAT32_BYTES * hidden + COMPUTE_BYTES * computed + max(hidden, attended, inner)


def num_graph_contexts(max_context_tokens: int) -> int:
    """Steps are captured for contexts of 2,048 tokens, 8,192, ... and for the longest."""
    count, tokens = 1, FIRST_GRAPH_TOKENS
    while tokens < max_context_tokens:
        count, tokens = count + 1, 4 * tokens
    return count


def _split_bytes(config: ModelConfig, max_context_tokens: int) -> int:
    """Of one sequence."""
    longest = -(-max_context_tokens // BLOCK_SIZE) * BLOCK_SIZE
    num_splits = -(-longest // SPLIT_TOKENS)
    return config.num_heads * num_splits * (config.head_dim + 2) * FLOAT32_BYTES
