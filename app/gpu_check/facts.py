"""What the check ran on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

PACKAGES = ("torch", "triton", "transformers", "bitsandbytes")


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Names and versions; nothing that tells whose machine it is."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "device": "cpu, interpreted",
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "num_processors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    return facts


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
