"""`python -m chatkv.kernels.cpu.native`: have the native kernels ready before the first start.

Never fails: without them the torch path runs.
"""

from __future__ import annotations

from .build import NoCompilerError
from .library import VARIANT_NAMES, native_library


def main() -> None:
    print("Getting the CPU kernels ready (compiled once, some seconds) ...", flush=True)
    try:
        (best, *_) = native_library().variants
    except NoCompilerError as error:
        print(f"The CPU runs on torch, several times slower: {error}")
    else:
        slow = " This processor lacks their instructions: torch runs." if best == "scalar" else ""
        print(f"CPU kernels: {VARIANT_NAMES[best]}.{slow}")


if __name__ == "__main__":
    main()
