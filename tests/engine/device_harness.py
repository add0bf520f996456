"""An engine on the device that works behind its back, driven step by step by a test."""

from __future__ import annotations

from fake_device import FakeDevice, FakeStep
from harness import Harness

from chatkv.engine.batch import Batch


class DeviceHarness(Harness):
    """The device gets on only when the host waits for it, unless a test says otherwise."""

    device: FakeDevice

    def _new_runner(self, num_blocks: int, image_bytes: int) -> tuple[FakeDevice, FakeDevice]:
        self.device = FakeDevice(num_blocks, image_bytes=image_bytes, max_pieces=0)
        return self.device, self.device

    def launch(self, batch: Batch) -> FakeStep:
        self.now_s += 0.02 + batch.num_tokens / self.tokens_per_s
        self.device.batches.append(batch)
        return self.device.launch(batch)

    def settle(self) -> None:
        """Until nothing is left to do, the tiers' share included."""
        self.run()
        while not self.engine.is_waiting:
            self.step()

    def check_quiet(self) -> None:
        """Nothing is held and nothing is under way."""
        assert not self.device.faults
        assert not self.device.unknown
        assert not self.engine.has_unfinished
        assert self.engine.stats().num_used == 0
        self.engine.check_integrity()
