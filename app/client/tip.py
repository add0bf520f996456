"""Where a turn goes when nobody says otherwise. In a file of its own: the terminal app paints before it needs HTTP."""

from __future__ import annotations

from enum import Enum


class Tip(Enum):
    TIP = "tip"


TIP = Tip.TIP
"""After the chat's last message."""
