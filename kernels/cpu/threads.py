"""Small operations run on one thread: waking a second one takes longer than they do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def single_thread(is_wanted: bool = True) -> Iterator[None]:
    """Run torch's operations within on the calling thread, if `is_wanted`. Takes a fraction of a microsecond."""
    num_threads = torch.get_num_threads()
    if not is_wanted or num_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
