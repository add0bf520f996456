"""The palette of rendered text from the app's theme."""

from __future__ import annotations

from textual.theme import Theme

from .render.palette import ASCII_GLYPHS, Glyphs, Palette


def palette_of(theme: Theme, is_ascii: bool) -> Palette:
    """Colours for the transcript and the bars. Themes of the terminal's own colours keep the defaults."""
    colors = theme.to_color_system().generate()

    def color(name: str, default: str) -> str:
        value = colors.get(name, default)
        return value[:7] if value.startswith("#") else default

    fallback = Palette()
    return Palette(
        foreground=color("foreground", fallback.foreground),
        muted=_mixed(color("foreground", "#e0e0e0"), color("background", "#121212"), 0.45),
        primary=color("primary-lighten-2" if theme.dark else "primary", fallback.primary),
        accent=color("accent", fallback.accent),
        success=color("success", fallback.success),
        warning=color("warning", fallback.warning),
        error=color("error", fallback.error),
        panel=color("surface", fallback.panel),
        is_dark=theme.dark,
        glyphs=ASCII_GLYPHS if is_ascii else Glyphs(),
    )


def _mixed(first: str, second: str, share: float) -> str:
    """`first` with `share` of `second`."""
    mixed = [
        round(int(first[at : at + 2], 16) * (1 - share) + int(second[at : at + 2], 16) * share) for at in (1, 3, 5)
    ]
    return "#" + "".join(f"{value:02x}" for value in mixed)
