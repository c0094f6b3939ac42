"""Charts as inline SVG: pure functions from numbers to markup. No scripts; what a mark means is its `title`.

Colours are classes (`cold`, `hot`), so that the page's style alone decides how they look in light and in dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tidelog.pipeline.jobs.report_text import escaped

_WIDTH, _HEIGHT = 640, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 8, 10, 26
_PLOT_WIDTH, _PLOT_HEIGHT = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
_TICKS_ACROSS = 5
_TICKS_UP = 4


class Column(NamedTuple):
    """One bar: what the store has of it below, what is on a disk alone on top."""

    cold: float
    hot: float
    title: str
    label: str


def bar_chart(title: str, columns: Sequence[Column], value_text: Callable[[float], str], base: int = 10) -> str:
    """Stacked bars with an axis. `base` is 1024 for bytes, so that the axis has round numbers of its own kind."""
    top = axis_top(max((column.cold + column.hot for column in columns), default=0.0), base)
    parts = [*_grid(top, value_text), *_bars(columns, top), *_labels(columns)]
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escaped(title)}">'
        + "".join(parts)
        + "</svg>"
    )


def axis_top(largest: float, base: int = 10) -> float:
    """The end of an axis: a number that `_TICKS_UP` divides into round ones, not below the largest value."""
    if largest <= 0:
        return float(_TICKS_UP)
    unit = 1.0
    while base == 1024 and largest / unit >= 1024:
        unit *= 1024
    step = largest / unit / _TICKS_UP
    magnitude = 10.0 ** math.floor(math.log10(step))
    nice = next(factor for factor in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if factor * magnitude >= step * 0.999999)
    return max(nice * magnitude * unit, 1.0) * _TICKS_UP


def _grid(top: float, value_text: Callable[[float], str]) -> list[str]:
    parts = []
    for tick in range(_TICKS_UP + 1):
        y = _TOP + _PLOT_HEIGHT * (1 - tick / _TICKS_UP)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        text = escaped(value_text(top * tick / _TICKS_UP))
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    return parts


def _bars(columns: Sequence[Column], top: float) -> list[str]:
    parts = []
    slot = _PLOT_WIDTH / max(len(columns), 1)
    gap = min(2.0, slot * 0.15)
    for index, column in enumerate(columns):
        x, width = _LEFT + index * slot + gap / 2, slot - gap
        cold, hot = _length(column.cold, top), _length(column.hot, top)
        base = _TOP + _PLOT_HEIGHT
        parts.append(
            f"<g><title>{escaped(column.title)}</title>"
            + _rectangle("reach", _LEFT + index * slot, _TOP, slot, _PLOT_HEIGHT)
            + _rectangle("cold", x, base - cold, width, cold)
            + _rectangle("hot", x, base - cold - hot, width, hot)
            + "</g>"
        )
    return parts


def _length(value: float, top: float) -> float:
    """In the picture; a value that is not zero is never invisible."""
    return max(1.5, value / top * _PLOT_HEIGHT) if value > 0 else 0.0


def _rectangle(kind: str, x: float, y: float, width: float, height: float) -> str:
    if not height:
        return ""
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def _labels(columns: Sequence[Column]) -> list[str]:
    """As many as fit below the axis, at even distances."""
    slot = _PLOT_WIDTH / max(len(columns), 1)
    every = max(1, math.ceil(len(columns) / _TICKS_ACROSS))
    parts = []
    for index in range(0, len(columns), every):
        x = min(max(_LEFT + (index + 0.5) * slot, _LEFT + 18.0), _WIDTH - _RIGHT - 34.0)
        text = escaped(columns[index].label)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{text}</text>')
    return parts


def sparkline(values: Sequence[float], title: str) -> str:
    """The shape of a row of numbers, small enough for a table."""
    top = max(values, default=0.0)
    step = 120 / max(len(values), 1)
    points = [(index * step, 22 - (20 * value / top if top else 0)) for index, value in enumerate(values)]
    path = "".join(f"L{x:.1f} {y:.1f}h{step:.1f}" for x, y in points)
    return (
        f'<svg class="spark" viewBox="0 0 120 22" role="img" aria-label="{escaped(title)}">'
        f'<title>{escaped(title)}</title><path d="M0 22{path}V22Z"/></svg>'
    )


def share_bar(cold: float, hot: float, largest: float, title: str) -> str:
    """Two lengths beside each other, in proportion to the largest such bar of a table."""
    widths = [100 * value / largest if largest else 0 for value in (cold, hot)]
    return (
        f'<span class="share" title="{escaped(title)}">'
        f'<i class="cold" style="width:{widths[0]:.2f}%"></i><i class="hot" style="width:{widths[1]:.2f}%"></i></span>'
    )
