"""One prompt computed in every way there is, compared bit for bit."""

from __future__ import annotations

import torch
from tiny import logits_of, sequence

from chatkv.engine.batch import Batch
from chatkv.engine.model_runner import ModelRunner


def check_invariance(runner: ModelRunner, ids: list[int]) -> None:
    """One prompt computed in many ways; every logit equal to the whole prompt's."""
    num_blocks = -(-len(ids) // 16)
    table = list(range(num_blocks))
    (whole,) = logits_of(runner, sequence(ids, 0, table))
    assert whole.isfinite().all()

    for sizes in ([64], [1, 17, 3, 130, 2, 33], [256, 1, 1, 1, 5]):
        table = table[::-1]
        assert torch.equal(in_chunks(runner, ids, table, sizes), whole), sizes

    # Token by token over the last stretch, which crosses a block's and a tile's edge.
    start = min(250, len(ids) - 20)
    in_chunks(runner, ids[:start], table, [100])
    for position in range(start, min(start + 24, len(ids))):
        (row,) = logits_of(runner, sequence(ids[position : position + 1], position, table))
        assert torch.equal(row[0], whole[position]), position

    # Eight sequences at once, of other lengths and kinds, this one among them.
    others = [[(i + 1) * num_blocks + block for block in range(num_blocks)] for i in range(7)]
    lengths = [min(length, len(ids) - 1) for length in (1, 5, 40, 257, 300, 16, 100)]
    reversed_ids = ids[::-1]
    for spare, length in zip(others, lengths, strict=True):
        in_chunks(runner, reversed_ids[:length], spare, [200])
    position = len(ids) - 1
    in_chunks(runner, ids[:position], table, [96])
    batch = [sequence([reversed_ids[n]], n, spare) for n, spare in zip(lengths, others, strict=True)]
    batch.insert(3, sequence(ids[position:], position, table))
    assert torch.equal(logits_of(runner, *batch)[3][0], whole[position])

    # A decode beside another's prefill chunk, and the chunk beside the decode.
    middle = min(131, position)
    rows = logits_of(
        runner,
        sequence(reversed_ids[:1], 0, others[0]),
        sequence(ids[middle:position], middle, table),
        sequence([reversed_ids[40 % len(ids)]], lengths[2], others[2]),
    )
    assert torch.equal(rows[1], whole[middle:position])

    # A prefix hit: another sequence's table starts with the same full blocks.
    hit = len(ids) // 2 // 16 * 16
    fork = table[: hit // 16] + others[4][: num_blocks - hit // 16]
    (rest,) = logits_of(runner, sequence(ids[hit:], hit, fork))
    assert torch.equal(rest, whole[hit:])

    # The whole prompt is a hit: the last token runs and writes nothing.
    before = runner.pool.clone()
    (last,) = logits_of(runner, sequence(ids[-1:], position, fork, is_stored=False))
    assert torch.equal(last[0], whole[-1])
    assert torch.equal(runner.pool, before)


def in_chunks(runner: ModelRunner, ids: list[int], table: list[int], sizes: list[int]) -> torch.Tensor:
    parts, start, turn = [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        parts += runner.all_logits(Batch([sequence(ids[start : start + size], start, table)])).unsqueeze(0)
        start, turn = start + size, turn + 1
    return torch.cat(parts)
