"""The border between stored text and the screen: nothing that a terminal could obey gets through.

Textual hands ESC, OSC and C1 bytes of displayed text to the terminal, so a model answer could retitle the window,
write the clipboard or move the cursor. Every string that comes from outside passes here once, as it enters the view.
"""

from __future__ import annotations

_DROPPED_BIDI = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_LINE_SEPARATORS = (0x2028, 0x2029)
_ESCAPE = 0x1B


def _table(newline: str, tab: str) -> dict[int, str]:
    table = dict.fromkeys((*range(0x20), *range(0x7F, 0xA0), *_DROPPED_BIDI), "")
    table |= dict.fromkeys(range(0xD800, 0xE000), "�")
    table |= dict.fromkeys(_LINE_SEPARATORS, newline)
    table |= {_ESCAPE: "␛", ord("\n"): newline, ord("\t"): tab}
    return table


_TEXT = _table("\n", "\t")
_LINE = _table(" ", " ")


def sanitize(text: str) -> str:
    """Text of several lines, safe to show: C0 (but newline and tab), C1, DEL and bidi overrides go; ESC shows as `␛`.

    Works character by character, so a stream may be cut anywhere: the parts give what the whole gives.
    """
    return text.translate(_TEXT)


def sanitize_line(text: str) -> str:
    """Text for one line (a title, a name, a path): as `sanitize`, and line breaks and tabs become spaces."""
    return text.translate(_LINE).strip()
