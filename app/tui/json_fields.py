"""Reading fields of the service's JSON without trusting their types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]


def string(data: Json, key: str) -> str:
    value = data.get(key)
    return value if isinstance(value, str) else ""


def number(data: Json, key: str) -> float:
    value = data.get(key)
    return float(value) if isinstance(value, (int, float)) else 0.0


def mapping(data: Json, key: str) -> Json:
    value = data.get(key)
    return value if isinstance(value, Mapping) else {}


def integer(data: Json, key: str) -> int:
    return int(number(data, key))
