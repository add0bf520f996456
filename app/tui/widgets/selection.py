"""How what is selected looks."""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style
from textual.screen import Screen
from textual.strip import Strip


def selected(strip: Strip, screen: Screen[object]) -> Strip:
    """The strip on the theme's selection colour. Most themes leave the text's own colour, which Rich cannot say: it
    would paint the text in the colour of its background."""
    style = screen.get_component_rich_style("screen--selection")
    if style.color == style.bgcolor:
        style = Style(bgcolor=style.bgcolor)
    return Strip(Segment.apply_style(strip, post_style=style))
