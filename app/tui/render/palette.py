"""Colours and glyphs of rendered text. Widgets build a palette from the theme; the renderers only use it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rich.color import Color
from rich.style import Style


@dataclass(frozen=True)
class Glyphs:
    bullets: tuple[str, ...] = ("•", "◦", "▪")
    quote_bar: str = "▎"
    rule: str = "─"
    cell_bar: str = "│"
    cross: str = "┼"
    done: str = "☑"
    open: str = "☐"
    cursor: str = "▍"
    selected_bar: str = "▌"
    writing: str = "●"
    waiting: str = "◐"
    star: str = "★"
    gauge_full: str = "▓"
    gauge_empty: str = "░"
    down: str = "▼"
    left: str = "◀"
    right: str = "▶"
    separator: str = "·"
    ellipsis: str = "…"
    prompt: str = "❯"
    private: str = "○"
    kv_device: str = "█"
    kv_host: str = "▓"
    kv_disk: str = "░"
    kv_missing: str = "·"
    opened: str = "▾"
    fork: str = "├"
    last_fork: str = "└"

    def of_tier(self, tier: str) -> str:
        return {"device": self.kv_device, "host": self.kv_host, "disk": self.kv_disk}.get(tier, self.kv_missing)


ASCII_GLYPHS = Glyphs(
    bullets=("*", "-", "+"),
    quote_bar="|",
    rule="-",
    cell_bar="|",
    cross="+",
    done="[x]",
    open="[ ]",
    cursor="_",
    selected_bar="|",
    writing="*",
    waiting="~",
    star="#",
    gauge_full="#",
    gauge_empty=".",
    down="v",
    left="<",
    right=">",
    separator="|",
    ellipsis="~",
    prompt=">",
    private="%",
    kv_device="#",
    kv_host="=",
    kv_disk="-",
    kv_missing=".",
    opened="v",
    fork="|",
    last_fork="`",
)


@dataclass(frozen=True)
class Palette:
    foreground: str = "#e0e0e0"
    muted: str = "#8a8f98"
    primary: str = "#7aa2f7"
    accent: str = "#e0af68"
    success: str = "#9ece6a"
    warning: str = "#e0af68"
    error: str = "#f7768e"
    panel: str = "#23262e"
    is_dark: bool = True
    glyphs: Glyphs = field(default_factory=Glyphs)

    @cached_property
    def text(self) -> Style:
        return Style(color=self.foreground)

    @cached_property
    def dim(self) -> Style:
        return Style(color=self.muted)

    @cached_property
    def strong(self) -> Style:
        return Style(color=self.foreground, bold=True)

    @cached_property
    def you(self) -> Style:
        return Style(color=self.accent, bold=True)

    @cached_property
    def assistant(self) -> Style:
        return Style(color=self.primary, bold=True)

    @cached_property
    def heading(self) -> Style:
        return Style(color=self.primary, bold=True)

    @cached_property
    def top_heading(self) -> Style:
        return Style(color=self.primary, bold=True, underline=True)

    @cached_property
    def bullet(self) -> Style:
        return Style(color=self.primary)

    @cached_property
    def link(self) -> Style:
        return Style(color=self.primary, underline=True)

    @cached_property
    def code(self) -> Style:
        return Style(color=self.accent, bgcolor=self.panel)

    @cached_property
    def code_text(self) -> Style:
        return Style(color=self.foreground, bgcolor=self.panel)

    @cached_property
    def code_title(self) -> Style:
        return Style(color=self.muted, bgcolor=self.panel)

    @cached_property
    def accented(self) -> Style:
        return Style(color=self.accent)

    @cached_property
    def good(self) -> Style:
        return Style(color=self.success)

    @cached_property
    def warn(self) -> Style:
        return Style(color=self.warning)

    @cached_property
    def bad(self) -> Style:
        return Style(color=self.error)

    def tier(self, name: str) -> Style:
        """Style of a tier of the KV cache, its bar and its gauge."""
        return {"device": self.good, "host": self.bullet, "disk": self.accented}.get(name, self.dim)

    @cached_property
    def _token_styles(self) -> dict[Any, Style]:
        return {}

    def token_style(self, token: Any) -> Style:
        """Style of a Pygments token type on the code background."""
        style = self._token_styles.get(token)
        if style is None:
            style = self._token_styles[token] = self.code_text + self._pygments_style(token)
        return style

    def _pygments_style(self, token: Any) -> Style:
        from pygments.styles import get_style_by_name

        found = get_style_by_name("one-dark" if self.is_dark else "default").style_for_token(token)
        return Style(
            color=Color.parse(f"#{found['color']}") if found["color"] else None,
            bold=found["bold"] or None,
            italic=found["italic"] or None,
        )
