"""A queue of work on a device, and marks in it. On a device without queues everything is done when a call returns.

All that is particular to CUDA's streams, events and page-locked memory is in here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


class Mark:
    """A place in a queue: it is reached when everything queued before it is done."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        """event: None: reached from the start."""
        self._event = event

    @property
    def is_reached(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Until it is reached. Raises what the device reports of the work before it."""
        if self._event is not None:
            self._event.synchronize()

    @property
    def event(self) -> torch.cuda.Event | None:
        return self._event


class DeviceStream:
    """Work runs in the order in which it was queued, beside that of other streams."""

    def __init__(self, device: torch.device, *, is_default: bool = False) -> None:
        """is_default: the one that torch uses where nobody asks for another, on every thread."""
        self.device = device
        self.cuda_stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.cuda_stream = torch.cuda.default_stream(device) if is_default else torch.cuda.Stream(device)

    def active(self) -> AbstractContextManager[object]:
        """What is launched within goes to this stream."""
        if self.cuda_stream is None:
            return nullcontext()
        # A thread begins on the first card. Going back to it afterwards would make a context there, which takes
        # hundreds of megabytes of a card that may be another program's.
        torch.cuda.set_device(self.cuda_stream.device)
        return torch.cuda.stream(self.cuda_stream)

    def mark(self) -> Mark:
        """Behind all that is queued now."""
        if self.cuda_stream is None:
            return Mark()
        # Who waits sleeps: the step behind is queued already, and a processor at full speed is heard.
        event = torch.cuda.Event(blocking=True)
        event.record(self.cuda_stream)
        return Mark(event)

    def wait_for(self, mark: Mark) -> None:
        """What is queued from now on runs after the mark, which another stream may have made. Does not wait itself."""
        if self.cuda_stream is not None and mark.event is not None:
            self.cuda_stream.wait_event(mark.event)

    def synchronize(self) -> None:
        if self.cuda_stream is not None:
            self.cuda_stream.synchronize()


def host_tensor(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[size] in host memory that `device` copies from and to by itself; not initialised."""
    return torch.empty(size, dtype=dtype, pin_memory=device.type == "cuda")
