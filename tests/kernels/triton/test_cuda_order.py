"""What is asked of CUDA, and in which order, on a stand-in for its streams, events and graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chatkv.engine.kv_layout import KVLayout
from chatkv.kernels.executor import StepRows
from chatkv.kernels.reference_attention import SequenceSpan
from chatkv.kernels.triton.executor import StepOutputs
from chatkv.kernels.triton.graphs import BATCH_SIZES, DecodeGraphs, table_widths
from chatkv.kernels.triton.step_inputs import InputPacker, StepInputs
from chatkv.kernels.triton.stream import DeviceStream

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
VOCAB_SIZE = 50


class FakeCuda:
    """Logs what is called; time passes when `run` is called."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.is_run = False
        self.capturing: Any = None
        self.default = self.stream_of(CUDA)
        self.current = self.default
        self.thread_device: torch.device | None = None
        """None: the first."""

    def stream_of(self, device: torch.device) -> Any:
        def wait_event(event: Any) -> None:
            self.log.append("wait_event")

        return SimpleNamespace(device=device, wait_event=wait_event, synchronize=lambda: self.log.append("synchronize"))

    @contextmanager
    def active(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def set_device(self, device: torch.device) -> None:
        self.thread_device = device

    def event(self, *, blocking: bool) -> Any:
        assert blocking, "a waiting thread would take a processor"
        return SimpleNamespace(
            record=lambda stream: self.log.append("record"),
            query=lambda: self.is_run,
            synchronize=lambda: self.log.append("synchronize event"),
        )

    def new_graph(self) -> Any:
        return SimpleNamespace(replay=lambda: self.log.append("replay"))

    @contextmanager
    def graph(self, cuda_graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local", "page-locked memory is taken on other threads meanwhile"
        assert stream is not self.default, "CUDA does not capture the default stream"
        assert stream is self.current, "the launch before has made its workspaces on another stream"
        self.log.append(f"capture into {pool}")
        self.capturing = cuda_graph
        yield
        self.capturing = None


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name, stand_in in (
        ("Stream", fake.stream_of),
        ("stream", fake.active),
        ("default_stream", lambda device: fake.default),
        ("set_device", fake.set_device),
        ("Event", fake.event),
        ("CUDAGraph", fake.new_graph),
        ("graph", fake.graph),
        ("graph_pool_handle", lambda: "the pool"),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return fake


def test_a_mark_is_reached_when_the_work_before_it_is_done(cuda: FakeCuda) -> None:
    steps, copies = DeviceStream(CUDA), DeviceStream(CUDA)
    mark = steps.mark()
    assert not mark.is_reached
    copies.wait_for(mark)
    mark.wait()
    assert cuda.log == ["record", "wait_event", "synchronize event"]
    cuda.is_run = True
    assert mark.is_reached


def test_steps_run_where_everybody_elses_work_runs(cuda: FakeCuda) -> None:
    steps, copies = DeviceStream(CUDA, is_default=True), DeviceStream(CUDA)
    assert steps.cuda_stream is cuda.default
    assert copies.cuda_stream is not cuda.default
    with copies.active():
        assert cuda.current is copies.cuda_stream
    assert cuda.current is cuda.default


def test_a_thread_that_works_on_another_card_than_the_first_stays_there(cuda: FakeCuda) -> None:
    second = torch.device("cuda", 1)
    with DeviceStream(second).active():
        assert cuda.thread_device == second
    assert cuda.thread_device == second


def test_without_queues_everything_is_done_at_once() -> None:
    stream = DeviceStream(CPU)
    with stream.active():
        mark = stream.mark()
    stream.wait_for(mark)
    stream.synchronize()
    assert mark.is_reached


class FakeExecutor:
    """Knows what graphs ask of an executor."""

    vocab_size = VOCAB_SIZE
    angles = ()

    def __init__(self, cuda: FakeCuda) -> None:
        self.device = CPU
        self.stream = DeviceStream(CUDA, is_default=True)
        self.packer = InputPacker(DeviceStream(CPU), VOCAB_SIZE)
        self._cuda = cuda
        self.inputs: list[StepInputs] = []

    def forward(self, inputs: StepInputs, kv: object, logits: torch.Tensor) -> StepOutputs:
        num_rows = len(inputs.token_ids)
        self.inputs.append(inputs)
        self._cuda.log.append(f"{'capture' if self._cuda.capturing else 'launch'} {num_rows}")
        return StepOutputs(logits.fill_(num_rows), torch.ones(num_rows, dtype=torch.bool))


@pytest.fixture
def executor(cuda: FakeCuda) -> FakeExecutor:
    return FakeExecutor(cuda)


@pytest.fixture
def graphs(executor: FakeExecutor) -> DecodeGraphs:
    layout = KVLayout(1, 1, 16, "fp16")
    graphs = DecodeGraphs(executor, layout.views(layout.new_pool(4, CPU)), 8192)  # type: ignore[arg-type]
    graphs._device = CUDA  # its tensors stay on the CPU
    return graphs


def decode(num_sequences: int, width: int = 1) -> StepRows:
    spans = [SequenceSpan(1, width * 16 - 1, (0,) * width)] * num_sequences
    return StepRows([3] * num_sequences, [-1] * num_sequences, spans, range(num_sequences))


def test_steps_are_captured_large_to_small_each_after_a_launch(
    graphs: DecodeGraphs, executor: FakeExecutor, cuda: FakeCuda
) -> None:
    progress: list[float] = []
    graphs.capture(progress.append)
    expected = ["record", "wait_event"]  # behind what the default stream still does
    for _ in (512, 128):
        for size in BATCH_SIZES:
            expected += [f"launch {size}", "synchronize", "capture into the pool", f"capture {size}"]
    assert cuda.log == [*expected, "synchronize"]
    widths = [inputs.block_tables.shape[1] for inputs in executor.inputs]
    assert widths == sorted(widths, reverse=True)
    assert len(progress) == len(graphs.graphs)
    assert progress[-1] == 1.0


def test_a_batch_replays_the_smallest_step_that_holds_it(graphs: DecodeGraphs, cuda: FakeCuda) -> None:
    graphs.capture()
    for num_sequences, width, size, table_width in ((1, 1, 1, 128), (3, 128, 4, 128), (9, 129, 16, 512)):
        cuda.log.clear()
        graph, _ = graphs.pack(decode(num_sequences, width))
        assert graph.inputs.block_tables.shape == (size, table_width)
        outputs = graphs.run(graph)
        assert cuda.log == ["replay"]
        assert len(outputs.logits) == size
        assert graph.inputs.lengths.tolist() == [width * 16] * num_sequences + [0] * (size - num_sequences)


def test_without_a_capture_steps_are_launched(graphs: DecodeGraphs, cuda: FakeCuda) -> None:
    graph, _ = graphs.pack(decode(5))
    graphs.run(graph)
    assert cuda.log == ["launch 8"]


def test_what_no_captured_step_holds_is_refused(graphs: DecodeGraphs) -> None:
    assert graphs.suits(decode(16))
    assert graphs.suits(decode(1, 512))
    assert not graphs.suits(decode(17))
    assert not graphs.suits(decode(1, 513))
    chunk = StepRows([3, 3], [-1, -1], [SequenceSpan(2, 0, (0,))], [1])
    assert not graphs.suits(chunk)
    assert not graphs.suits(StepRows([3], [-1], [SequenceSpan(1, 0, (0,))], []))


@pytest.mark.parametrize(
    ("context", "widths"),
    [(100, [7]), (2048, [128]), (2049, [129, 128]), (8192, [512, 128]), (131_072, [8192, 2048, 512, 128])],
)
def test_widths_of_block_tables(context: int, widths: list[int]) -> None:
    assert table_widths(context, 16) == widths
