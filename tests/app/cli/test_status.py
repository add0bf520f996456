"""`chatkv status`: on what the model runs, what lies there, and why."""

from __future__ import annotations

from typing import Any

from chatkv.app.cli.service import _lines

HOME = {"models": "/m", "data": "/d", "cache": "/c"}
FILES = {"socket": "/s", "key_file": "/k", "settings_file": "/t", "log_file": "/l"}


def lines(device: str, **model: Any) -> dict[str, str]:
    told = {"name": "llama", "state": "ready", **model}
    found = {"running": True, "pid": 7, "version": "1", "model": told, "device": device, "tiers": {}, "notice": None}
    counts = {"num_running": 0, "num_waiting": 0, "url": "http://127.0.0.1:1", "home": HOME}
    return dict(_lines({**found, **counts, **FILES}))


def test_plan_and_note_stand_below_the_device() -> None:
    plan = "Weights in bf16, 2.3 GiB (16.0 bits each)."
    shown = lines("cuda", kernels="Triton on NVIDIA A100, bf16", card="NVIDIA A100", plan=plan, note="Of 2 GPUs.")
    assert shown["device"] == "cuda, Triton on NVIDIA A100, bf16"
    assert (shown["plan"], shown["note"]) == (plan, "Of 2 GPUs.")
    assert list(shown)[3:6] == ["device", "plan", "note"]


def test_what_is_not_told_has_no_line() -> None:
    assert not {"plan", "note"} & lines("cpu", kernels="native AVX2", plan=None, note=None).keys()
    assert not {"plan", "note"} & lines("cpu").keys(), "a service of an older version"


def test_why_a_model_could_not_be_loaded_is_told_in_one_line() -> None:
    shown = lines("cpu", state="failed", error='No NVIDIA GPU was found.\ndevice = "cpu" runs on the CPU.')
    assert shown["error"] == 'No NVIDIA GPU was found. device = "cpu" runs on the CPU.'
