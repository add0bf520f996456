"""The digest of the native arithmetic is one, on every instruction set, and notices a last bit."""

from __future__ import annotations

import pytest
import torch

from chatkv.kernels.cpu.native.digest import digest_of, fixed_program
from chatkv.kernels.cpu.native.library import native_library
from chatkv.kernels.cpu.native.model import NativeModel

GOLDEN = "65183985bc8bbdef"
"""Another one means that stored blocks no longer hold what they held: raise NUMERICS_EPOCH in engine/models/decoder.py,
though this digest alone makes old caches stale."""


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("variant", native_library().variants)
def test_every_instruction_set_gives_the_golden_digest(variant: str, num_threads: int) -> None:
    model = NativeModel(fixed_program(), native_library(), num_threads, variant)
    assert digest_of(lambda rows, kv: model.run(rows, kv).logits) == GOLDEN


def test_other_logits_give_another_digest() -> None:
    model = NativeModel(fixed_program(), native_library(), 1)
    assert digest_of(lambda rows, kv: model.run(rows, kv).logits.nextafter(torch.tensor(99.0))) != GOLDEN
