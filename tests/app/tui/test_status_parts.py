"""What the status line says of the model: its format, and on what it runs."""

from __future__ import annotations

from typing import Any

from chatkv.app.tui.board import Board
from chatkv.app.tui.render.palette import Palette
from chatkv.app.tui.service_records import ServiceStatus
from chatkv.app.tui.status_parts import model_part


def words(device: str, width: int = 120, **model: Any) -> str:
    board = Board()
    board.is_connected = board.is_known = True
    told = {"name": "llama-3.1-8b", "state": "ready", "weight_format": "int4-affine-g32", **model}
    board.status = ServiceStatus.from_json({"model": told, "device": device})
    return "".join(text for text, _ in model_part(board, width, Palette()))


def test_a_gpu_is_called_by_its_name() -> None:
    card = "NVIDIA GeForce RTX 4090"
    assert words("cuda", card=card, kernels=f"Triton on {card}, bf16") == "llama-3.1-8b int4 RTX 4090"
    assert words("cuda", card="NVIDIA A100-SXM4-80GB") == "llama-3.1-8b int4 A100-SXM4-80GB"
    assert "\x1b" not in words("cuda", card="\x1b[31mcard")


def test_on_the_cpu_the_kernels_are_told() -> None:
    assert words("cpu", card=None, kernels="native AVX2, 2 threads") == "llama-3.1-8b int4 cpu native"


def test_narrow_lines_have_the_name_only() -> None:
    assert words("cuda", width=99, card="NVIDIA GeForce RTX 4090") == "llama-3.1-8b"
