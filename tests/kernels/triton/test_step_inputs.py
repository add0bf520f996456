"""What a step is told: packed on the host, read on the device."""

from __future__ import annotations

import pytest
import torch

from chatkv.kernels.executor import StepRows
from chatkv.kernels.reference_attention import SequenceSpan
from chatkv.kernels.triton.pending_ids import fill_pending
from chatkv.kernels.triton.step_inputs import NUM_HOST_BUFFERS, InputPacker, StepInputs, StepShape
from chatkv.kernels.triton.stream import DeviceStream, Mark

CPU = torch.device("cpu")
VOCAB_SIZE = 50
ROWS = StepRows(
    token_ids=[4, 5, 6, -2, 8],
    slots=[33, 34, -1, 1 << 33, 81],
    spans=[SequenceSpan(3, 17, (9, 2)), SequenceSpan(1, 40, (7, 3, 5)), SequenceSpan(1, 0, (5,))],
    selected=[2, 3],
)


@pytest.fixture
def packer() -> InputPacker:
    return InputPacker(DeviceStream(CPU), VOCAB_SIZE)


def test_every_part_says_what_the_rows_say(packer: InputPacker) -> None:
    inputs = packer.pack(ROWS, new_blocks=[5], num_pending=2)
    assert inputs.token_ids.tolist() == ROWS.token_ids
    assert inputs.slots.tolist() == ROWS.slots
    assert inputs.positions.tolist() == [17, 18, 19, 40, 0]
    assert inputs.cu_rows.tolist() == [0, 3, 4, 5]
    assert inputs.start_positions.tolist() == [17, 40, 0]
    assert inputs.lengths.tolist() == [20, 41, 1]
    assert inputs.block_tables.tolist() == [[9, 2, 0], [7, 3, 5], [5, 0, 0]]
    assert inputs.selected.tolist() == [2, 3]
    assert inputs.new_blocks.tolist() == [5]
    assert (inputs.max_rows, inputs.is_decode, inputs.is_all_selected) == (3, False, False)


def test_parts_are_aligned_and_do_not_overlap() -> None:
    for num_rows in range(1, 20):
        bounds = StepShape(num_rows, max(num_rows - 3, 1), 5, num_rows // 2, num_rows % 3).bounds
        assert all(start % 4 == 0 for start, _ in bounds)
        ends = [stop for _, stop in bounds]
        assert all(stop <= start for stop, (start, _) in zip(ends, bounds[1:], strict=False))


def test_what_a_larger_shape_leaves_is_padding(packer: InputPacker) -> None:
    """Whatever an earlier step has left in the buffers."""
    shape = StepShape(4, 4, 6, 4, 4)
    packed = torch.full((shape.size,), -7, dtype=torch.int32)
    inputs = StepInputs.of(packed, shape, max_rows=1, is_all_selected=True)
    for _ in range(NUM_HOST_BUFFERS):
        busy = StepRows([9] * 4, [77] * 4, [SequenceSpan(1, 90, (1, 2, 3, 4, 5, 6))] * 4, range(4))
        packer.pack_into(packed, shape, busy, [1, 2, 3, 4])
    rows = StepRows([8], [81], [SequenceSpan(1, 17, (2, 5))], [0])
    packer.pack_into(packed, shape, rows, [5])
    assert inputs.slots.tolist() == [81, -1, -1, -1]
    assert inputs.token_ids.tolist() == [8, 0, 0, 0]
    assert inputs.positions.tolist() == [17, 0, 0, 0]
    assert inputs.lengths.tolist() == [18, 0, 0, 0]
    assert inputs.start_positions.tolist() == [17, 0, 0, 0]
    assert inputs.cu_rows.tolist() == [0, 1, 1, 1, 1]
    assert inputs.block_tables.tolist() == [[2, 5, 0, 0, 0, 0], *[[1, 2, 3, 4, 5, 6]] * 3]
    assert inputs.new_blocks[:1].tolist() == [5]
    inputs.fill_with_padding()
    assert inputs.slots.tolist() == [-1] * 4
    assert inputs.cu_rows.tolist() == [0] * 5
    assert inputs.lengths.tolist() == [0] * 4


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, -3])
def test_a_token_id_that_the_model_does_not_know_is_refused(packer: InputPacker, token_id: int) -> None:
    rows = StepRows([4, token_id], [0, 1], [SequenceSpan(2, 0, (0,))], [1])
    with pytest.raises(IndexError, match=r"0 \.\. 49"):
        packer.pack(rows, num_pending=2)
    assert packer.pack(StepRows([4, -2], [0, 1], rows.spans, [1]), num_pending=2).token_ids.tolist() == [4, -2]


def test_a_large_step_finds_room(packer: InputPacker) -> None:
    table = tuple(range(20_000))
    for _ in range(NUM_HOST_BUFFERS + 1):
        inputs = packer.pack(StepRows([1], [0], [SequenceSpan(1, 319_999, table)], [0]))
        assert inputs.block_tables[0].tolist() == list(table)


class LateMark(Mark):
    """Reached when somebody waits for it."""

    def __init__(self, name: int, log: list[str]) -> None:
        super().__init__()
        self._name, self._log = name, log

    def wait(self) -> None:
        self._log.append(f"wait {self._name}")


def test_a_host_buffer_is_filled_again_only_when_its_copy_is_over(
    packer: InputPacker, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    numbers = iter(range(100))
    monkeypatch.setattr(DeviceStream, "mark", lambda stream: LateMark(next(numbers), log))
    for step in range(2 * NUM_HOST_BUFFERS):
        log.append(f"step {step}")
        packer.pack(ROWS, num_pending=2)
    expected = [f"step {step}" for step in range(NUM_HOST_BUFFERS)]
    for step in range(NUM_HOST_BUFFERS):
        expected += [f"step {step + NUM_HOST_BUFFERS}", f"wait {step}"]
    assert log == expected


def test_pending_ids_are_filled_on_the_device() -> None:
    sampled = torch.tensor([30, 31, 32, 33], dtype=torch.int32)
    for num_rows in (1, 5, 300):
        ids = torch.randint(-4, VOCAB_SIZE, (num_rows,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
        expected = [int(sampled[-1 - token]) if token < 0 else token for token in ids.tolist()]
        assert fill_pending(ids, sampled).tolist() == expected
