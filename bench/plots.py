"""Two plots of the results, as SVG without anything from outside, each for a light and for a dark page.

`ratios` shows how many times as good as a peer each operation is, on a logarithmic axis with the peer at 1. `growth`
shows the time of operations at 1, 10 and 100 times the size, on two logarithmic axes, beside a linear one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 860
ROW = 22
LEGEND = 20
DASHES = ("", "2 2", "8 4", "8 3 2 3")
LABELS = 400
FONT = "ui-sans-serif, system-ui, sans-serif"


@dataclass(frozen=True)
class Theme:
    """The colours of a page."""

    background: str
    text: str
    faint: str
    better: str
    worse: str
    lines: tuple[str, ...]


THEMES = {
    "light": Theme(
        *("#ffffff", "#1f2328", "#d1d9e0", "#1a7f37", "#bc4c00"),
        ("#0969da", "#1a7f37", "#bc4c00", "#8250df", "#cf222e", "#57606a", "#bf3989", "#4d2d00"),
    ),
    "dark": Theme(
        *("#0d1117", "#e6edf3", "#3d444d", "#3fb950", "#f0883e"),
        ("#58a6ff", "#3fb950", "#f0883e", "#bc8cff", "#ff7b72", "#8b949e", "#f778ba", "#d4a72c"),
    ),
}


def ratios(rows: Sequence[tuple[str, float]], theme: Theme) -> str:
    """Bars from 1 to how many times as good each is."""
    low = min(-1, math.floor(min(math.log10(value) for _, value in rows)))
    high = max(1, math.ceil(max(math.log10(value) for _, value in rows)))
    height = ROW * len(rows) + 60
    room = WIDTH - LABELS - 70

    def across(exponent: float) -> float:
        return LABELS + room * (exponent - low) / (high - low)

    parts = [_text(12, 20, "times as good as the peer (logarithmic; the peer is at 1)", theme.text, 13)]
    for exponent in range(low, high + 1):
        x = across(exponent)
        width = 2 if exponent == 0 else 1
        parts.append(_line(x, 32, x, height - 22, theme.text if exponent == 0 else theme.faint, width))
        parts.append(_text(x, height - 8, f"{10.0**exponent:g}", theme.text, 11, "middle"))
    for number, (label, value) in enumerate(rows):
        y = 38 + number * ROW
        left, right = sorted((across(0), across(math.log10(value))))
        color = theme.better if value >= 1 else theme.worse
        parts.append(_text(LABELS - 10, y + 12, label, theme.text, 11, "end"))
        parts.append(
            f'<rect x="{left:.1f}" y="{y}" width="{max(1.0, right - left):.1f}" height="{ROW - 7}" fill="{color}"/>'
        )
        parts.append(_text(max(across(0), right) + 5, y + 12, f"{value:.3g}", theme.text, 11))
    return _drawing(height, parts, theme)


def growth(operations: Mapping[str, Mapping[str, Sequence[float]]], theme: Theme) -> str:
    """A line an operation: the time at each size over the time at the smallest."""
    height, top, left, right = max(420, 60 + LEGEND * len(operations)), 40, 60, WIDTH - 250
    highest = 2.5

    def at(size: float, times: float) -> tuple[float, float]:
        x = left + (right - left) * math.log10(size) / 2
        return x, height - 40 - (height - 40 - top) * (math.log10(times) + 0.5) / (highest + 0.5)

    parts = [_text(12, 20, "time at 1, 10 and 100 times the size, over that at 1 (dashed: linear)", theme.text, 13)]
    for exponent in range(3):
        x, y = at(10**exponent, 10**exponent)
        _, bottom = at(1, 10**-0.5)
        parts.append(_line(x, top, x, bottom, theme.faint, 1))
        parts.append(_line(left, y, right, y, theme.faint, 1))
        parts.append(_text(x, bottom + 18, f"{10**exponent}x", theme.text, 11, "middle"))
        parts.append(_text(left - 8, y + 4, f"{10**exponent}x", theme.text, 11, "end"))
    parts.append(_path([at(1, 1), at(100, 100)], theme.text, "5 4"))
    for number, (name, seconds) in enumerate(operations.items()):
        sizes = [int(size) for size in seconds]
        fastest = [min(rounds) for rounds in seconds.values()]
        points = [
            at(size / sizes[0], max(10**-0.5, min(10**highest, one / fastest[0])))
            for size, one in zip(sizes, fastest, strict=True)
        ]
        color = theme.lines[number % len(theme.lines)]
        dash = DASHES[number // len(theme.lines) % len(DASHES)]
        parts.append(_path(points, color, dash))
        y = top + 6 + number * LEGEND
        parts.append(_path([(right + 24, y), (right + 48, y)], color, dash))
        parts.append(_text(right + 56, y + 4, name, theme.text, 11))
    return _drawing(height, parts, theme)


def _text(x: float, y: float, words: str, color: str, size: int, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" font-size="{size}" text-anchor="{anchor}">{escape(words)}</text>'
    )


def _line(x: float, y: float, to_x: float, to_y: float, color: str, width: int) -> str:
    return f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" stroke="{color}" stroke-width="{width}"/>'


def _path(points: Sequence[tuple[float, float]], color: str, dash: str) -> str:
    way = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="M{way}" fill="none" stroke="{color}" stroke-width="2"{dashed}/>'


def _drawing(height: int, parts: Sequence[str], theme: Theme) -> str:
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    body = "\n".join(parts)
    background = f'<rect width="{WIDTH}" height="{height}" fill="{theme.background}"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}">\n{background}\n{body}\n</svg>\n'
