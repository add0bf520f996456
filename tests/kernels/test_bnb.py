"""What bitsandbytes packs: our reading of it, its own, and products on the CPU."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from chatkv.kernels import bnb
from chatkv.kernels.bnb import NoBitsandbytesError, pack_int8, pack_nf4, unpack
from chatkv.kernels.cpu.backend import CpuBackend
from chatkv.kernels.reference import NF4_NUMBERS, dequantise
from chatkv.kernels.weights import FpWeight, num_bytes, select_rows

PACK = {"nf4": pack_nf4, "int8-bnb": pack_int8}
WORST = {"nf4": (1.0 - 0.6961928009986877) / 2, "int8-bnb": 0.5 / 127}
"""Largest error, of the largest number of a block: half of the widest gap."""
BLOCK = {"nf4": 64, "int8-bnb": 192}


def numbers(num_rows: int, num_columns: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", PACK)
def test_the_reference_reads_what_bitsandbytes_reads(name: str, dtype: torch.dtype) -> None:
    weight = PACK[name](numbers(33, 192).to(dtype))
    assert weight.shape == (33, 192)
    assert torch.equal(dequantise(weight), unpack(weight, torch.float32))
    half = unpack(weight, torch.bfloat16).float()
    torch.testing.assert_close(half, dequantise(weight), rtol=2**-8, atol=0)


@pytest.mark.parametrize("name", PACK)
def test_the_error_is_bounded_by_the_widest_gap(name: str) -> None:
    matrix = numbers(33, 192)
    blocks = matrix.view(33, -1, BLOCK[name])
    error = (dequantise(PACK[name](matrix)).view(blocks.shape) - blocks).abs()
    largest = blocks.abs().amax(-1, keepdim=True)
    assert bool((error <= largest * WORST[name] * 1.0001).all())
    assert float(error.max()) > 0


def test_the_numbers_of_nf4_are_kept() -> None:
    row = torch.tensor(NF4_NUMBERS * 4).unsqueeze(0) * 3
    assert torch.equal(dequantise(pack_nf4(row)), row)


@pytest.mark.parametrize("name", PACK)
def test_zeros_stay_zeros(name: str) -> None:
    matrix = numbers(5, 192)
    matrix[2] = 0
    found = dequantise(PACK[name](matrix))
    assert not bool(found[2].any())
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("name", PACK)
def test_rows_can_be_moved(name: str) -> None:
    weight, rows = PACK[name](numbers(9, 128)), torch.tensor([7, 0, 3])
    assert torch.equal(dequantise(select_rows(weight, rows)), dequantise(weight)[rows])


@pytest.mark.parametrize("name", PACK)
def test_products_on_the_cpu(name: str) -> None:
    """Stacked matrices, with a bias; a row's bits are its own."""
    weights = [PACK[name](numbers(rows, 256, seed)) for seed, rows in enumerate((40, 24))]
    bias = numbers(1, 64, 7)[0]
    backend = CpuBackend()
    prepared = backend.prepare_linear(weights, bias)
    assert backend.weight_bytes(prepared) == sum(num_bytes(weight) for weight in weights) < 64 * 256 * 1.1
    backend.seal(1, 1, 64)
    x = numbers(37, 256, 9)
    found = backend.linear(x, prepared)
    exact = x.double() @ torch.cat([dequantise(weight) for weight in weights]).double().T + bias.double()
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)
    for row in (0, 20, 36):
        assert torch.equal(backend.linear(x[row : row + 1], prepared)[0], found[row])


def test_plain_and_packed_matrices_of_one_shape_live_side_by_side() -> None:
    backend = CpuBackend()
    matrix = numbers(64, 128)
    plain, packed = backend.prepare_linear([FpWeight(matrix)]), backend.prepare_linear([pack_nf4(matrix)])
    backend.seal(1, 1, 64)
    x = numbers(5, 128, 1)
    torch.testing.assert_close(backend.linear(x, plain), x @ matrix.T, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(backend.linear(x, packed), x @ dequantise(pack_nf4(matrix)).T, rtol=1e-5, atol=1e-4)


def test_importing_it_neither_downloads_code_nor_complains(tmp_path: Path) -> None:
    """Where the package `kernels` is installed, bitsandbytes would fetch code through it. Threads may come at once."""
    (tmp_path / "kernels.py").write_text("def get_kernel(*_, **__): raise SystemExit('code was to be downloaded')\n")
    code = (
        "import sys, torch, kernels; from concurrent.futures import ThreadPoolExecutor as Pool;"
        "from chatkv.kernels.bnb import pack_nf4; list(Pool(4).map(pack_nf4, [torch.ones(1, 64)] * 4));"
        "assert sys.modules['kernels'] is kernels"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_bitsandbytes_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    bnb._operations.cache_clear()
    with pytest.raises(NoBitsandbytesError, match="pip install bitsandbytes"):
        pack_nf4(numbers(1, 64))
    assert not logging.getLogger("bitsandbytes.backends.cpu.ops").disabled
