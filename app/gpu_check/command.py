"""`gpu-check`: is every kernel right on this GPU, and how fast is it? Some minutes; a table and JSON at the end.

    python -m chatkv.app gpu-check            # installed
    python3 app/gpu_check                     # in a checkout, whatever is installed

It needs torch with CUDA and triton, nothing else; checks that want more are left out and say why.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .sizes import Sizes

EXIT_OK, EXIT_WRONG, EXIT_NO_GPU = 0, 1, 2
SECTIONS = ("checks", "model", "figures", "step", "transfers")


def main(arguments: Sequence[str]) -> int:
    """The exit status: 0 when nothing is wrong, whatever the speed."""
    options = parsed(arguments)
    import torch

    if not torch.cuda.is_available():
        print("There is no CUDA device that this torch can use, so there is nothing to check.", file=sys.stderr)
        return EXIT_NO_GPU
    from .sizes import CARD

    return run(options, torch.device("cuda", torch.cuda.current_device()), CARD)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu-check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=_sections, default=SECTIONS, metavar="A,B", help=", ".join(SECTIONS))
    parser.add_argument("--model", type=Path, metavar="DIR", help="an imported model; default: the installed one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: build/gpu-check.json")
    return parser.parse_args(arguments)


def _sections(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(SECTIONS):
        raise argparse.ArgumentTypeError(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    return names


def run(options: argparse.Namespace, device: torch.device, sizes: Sizes) -> int:
    """On "cpu" the interpreter stands for the card: everything runs, and figures mean nothing."""
    import torch

    from .bench_device import BenchDevice
    from .engine_figures import EngineFigures
    from .facts import machine_facts
    from .kernel_checks import KernelChecks
    from .kernel_figures import KernelFigures
    from .machine import measure_machine
    from .model_checks import ModelChecks
    from .results import Results
    from .step_figures import StepFigures

    since = time.monotonic()
    bench = BenchDevice(device)
    torch.manual_seed(0)
    results = Results(
        lambda line: print(f"[{time.monotonic() - since:5.0f} s] {line}", flush=True), has_targets=bench.is_cuda
    )
    results.facts = machine_facts(device)
    machine = measure_machine(bench, results)
    parts: dict[str, Callable[[], None]] = {
        "checks": lambda: KernelChecks(bench, sizes, results).run(),
        "model": lambda: ModelChecks(bench, sizes, results, options.model).run(),
        "figures": lambda: KernelFigures(bench, machine, sizes, results).measure(),
        "step": lambda: StepFigures(bench, machine, sizes, results).measure(),
        "transfers": lambda: EngineFigures(bench, machine, sizes, results).measure(),
    }
    for name in SECTIONS:
        if name in options.only:
            parts[name]()
            if bench.is_cuda:
                torch.cuda.empty_cache()
    results.facts["seconds"] = round(time.monotonic() - since, 1)
    file: Path = options.json or Path(__file__).resolve().parents[2] / "build" / "gpu-check.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    results.write_json(file)
    print(f"\n{results.facts}\n\n{results.table()}\n\nWritten to {file}.", flush=True)
    return EXIT_OK if results.is_good else EXIT_WRONG
