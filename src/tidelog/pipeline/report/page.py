"""Renders a report: one self-contained HTML file, readable without scripts and without a network.

Invariants
- It is both well-formed XML and HTML, and its own policy forbids scripts and external resources.
- Foreign text is escaped where it is inserted, never earlier or later.
- It grows with the number of topics: one row for each, and charts only for the largest ones.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from tidelog.clock import to_datetime
from tidelog.pipeline.report.figures import TimeBins, TimeCounts, TopicFigures

# Numbers, times and foreign text as they stand on the page.
#
# Invariants
# - All text from outside this package goes through `escaped`: it can neither end an element or an attribute nor
#   hold a character that no document may hold.


_NOT_IN_DOCUMENTS = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# They change the direction of the text around them, so that a name could pose as another one.
_STEERING = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNT_UNITS = ("", "k", "M", "G", "T")
_DAY_US = 86_400_000_000
_MINUTE_US = 60_000_000


def escaped(text: object) -> str:
    """Text that stands for nothing but itself, between elements and in attributes."""
    harmless = _STEERING.sub("\ufffd", _NOT_IN_DOCUMENTS.sub("\ufffd", str(text)))
    return html.escape(harmless, quote=True)


def counted(count: float, noun: str) -> str:
    """`1 message`, `2,000 messages`."""
    number = round(count)
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def byte_text(count: float) -> str:
    """A size in the largest unit that leaves a number before the point."""
    size, unit = float(count), 0
    while size >= 1024 and unit < len(_BYTE_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{_short(size)} {_BYTE_UNITS[unit]}"


def count_text(count: float) -> str:
    """A count short enough for an axis: 950, 1.5k, 20M."""
    size, unit = float(count), 0
    while size >= 1000 and unit < len(_COUNT_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{_short(size)}{_COUNT_UNITS[unit]}"


def _short(size: float) -> str:
    return f"{size:.0f}" if size >= 100 or size == round(size) else f"{size:.1f}"


def moment_text(time_us: int) -> str:
    """A moment in UTC, to the second."""
    return _format(time_us, "%Y-%m-%d %H:%M:%S")


def tick_text(time_us: int, width_us: int) -> str:
    """A moment on an axis whose bins are this wide: as much of it as is needed to tell them apart."""
    if width_us >= _DAY_US:
        return _format(time_us, "%Y-%m-%d")
    return _format(time_us, "%m-%d %H:%M" if width_us >= _MINUTE_US else "%H:%M:%S")


def _format(time_us: int, pattern: str) -> str:
    try:
        return to_datetime(time_us).strftime(pattern)
    except OverflowError:
        return f"{time_us} us"


# Charts as inline SVG: pure functions from numbers to markup. No scripts; what a mark means is its `title`.
#
# Colours are classes (`cold`, `hot`), so that the page's style alone decides how they look in light and in dark.


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


# The look of the report: one style sheet, for light and dark, for wide and narrow, for screens and paper.


STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --line: #e2e5ea; --text: #1c2430; --quiet: #5d6878;
  --cold: #2f6fbf; --hot: #e08a1e; --bad: #b3261e; --grid: #e8ebf0;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161c; --card: #1b212a; --line: #2d3642; --text: #e6eaf0; --quiet: #9aa6b6;
    --cold: #5b9bea; --hot: #f0a545; --bad: #ff8a80; --grid: #2a323d;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem clamp(0.75rem, 3vw, 2.5rem) 4rem; max-width: 84rem;
  background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
h1 { font-size: 1.6rem; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 0.7rem; }
h3 { font-size: 0.95rem; margin: 0 0 0.5rem; font-weight: 600; }
p { margin: 0.3rem 0; }
code { font: 0.92em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.quiet { color: var(--quiet); font-size: 0.88rem; }
.bad { color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: 0.8rem; margin: 1.3rem 0 0; }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 0.7rem 0.9rem; }
.tile b { display: block; font-size: 1.45rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile span { color: var(--quiet); font-size: 0.85rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 0.8rem; }
.card { padding: 0.9rem 1rem; min-width: 0; }
.chart { display: block; width: 100%; height: auto; }
.chart .grid { stroke: var(--grid); }
.chart .tick { fill: var(--quiet); font-size: 12px; font-variant-numeric: tabular-nums; }
.chart .reach { fill: transparent; }
.chart g:hover .reach { fill: var(--grid); }
.chart .cold, .spark path { fill: var(--cold); }
.chart .hot { fill: var(--hot); }
.spark { display: block; width: 7.5rem; height: 1.4rem; }
.legend { margin: 0.5rem 0 0; }
.legend i { display: inline-block; width: 0.7rem; height: 0.7rem; border-radius: 2px; margin: 0 0.35rem 0 0.9rem; }
.legend i:first-child { margin-left: 0; }
i.cold { background: var(--cold); } i.hot { background: var(--hot); }
.scroll { overflow-x: auto; padding: 0; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
th, td { padding: 0.42rem 0.8rem; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
th { color: var(--quiet); font-weight: 600; font-size: 0.82rem; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td.name { white-space: normal; overflow-wrap: anywhere; min-width: 11rem; }
td.prose { white-space: normal; }
table.kept td { padding: 0.42rem 0.4rem; }
table.kept td:nth-child(2) { width: 50%; }
.share { display: flex; min-width: 8rem; height: 0.7rem; border-radius: 3px; overflow: hidden; }
.share { background: var(--grid); }
.kept .share { min-width: 3rem; }
.share i { display: block; height: 100%; flex: none; }
details { margin: 0.6rem 0; }
summary { cursor: pointer; padding: 0.6rem 1rem; overflow-wrap: anywhere; }
details > .charts, details > .card { margin: 0 0.8rem 0.8rem; }
details.card { padding: 0; }
a { color: inherit; }
@media print { body { background: none; max-width: none; } .card, .tile { break-inside: avoid; } }
""".strip()


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_MAX_SUBSCRIPTIONS = 100
_WHERE = '<p class="legend quiet"><i class="cold"></i>in the store<i class="hot"></i>on this disk alone</p>'
_WHAT = '<p class="legend quiet"><i class="cold"></i>objects in the store<i class="hot"></i>files on this disk</p>'


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """All that the page shows. `times` are the counts of each topic, in the order of `topics`."""

    root: str
    made_us: int
    topics: Sequence[TopicFigures]
    bins: TimeBins | None
    times: Sequence[TimeCounts]
    is_exact: bool
    max_details: int


def page_html(page: Page) -> str:
    """The page as text."""
    return "\n".join(_document(page)) + "\n"


def _document(page: Page) -> Iterator[str]:
    yield "<!DOCTYPE html>"
    yield '<html lang="en" xmlns="http://www.w3.org/1999/xhtml"><head><meta charset="utf-8"/>'
    yield f'<meta http-equiv="Content-Security-Policy" content="{escaped(_POLICY)}"/>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
    yield f"<title>tidelog: {escaped(page.root)}</title><style>\n{STYLE}\n</style></head><body>"
    yield f"<header><h1>tidelog report</h1><p><code>{escaped(page.root)}</code></p>"
    yield f'<p class="quiet">as of {escaped(moment_text(page.made_us))} UTC</p></header>'
    yield _tiles(page.topics)
    if not page.topics:
        yield '<p class="card" style="margin-top:1.3rem">There are no topics here.</p>'
    else:
        yield from _all_topics(page)
    yield "</body></html>"


def _tiles(topics: Sequence[TopicFigures]) -> str:
    tiles = [
        (f"{len(topics):,}", "topic" if len(topics) == 1 else "topics"),
        (count_text(sum(topic.messages for topic in topics)), "messages"),
        (byte_text(sum(topic.cold_bytes for topic in topics)), "in the store"),
        (byte_text(sum(topic.hot_bytes for topic in topics)), "on this disk"),
        (count_text(sum(topic.unshipped_messages for topic in topics)), "messages not shipped yet"),
        (count_text(max((topic.lag_messages for topic in topics), default=0)), "largest lag of a subscription"),
    ]
    cells = "".join(f'<div class="tile"><b>{escaped(number)}</b><span>{what}</span></div>' for number, what in tiles)
    return f'<section class="tiles">{cells}</section>'


def _all_topics(page: Page) -> Iterator[str]:
    yield "<h2>All topics</h2>"
    yield _charts(page, page.topics, _summed(page))
    yield "<h2>Topics</h2>"
    yield _topic_table(page)
    yield from _problems(page.topics)
    yield from _subscriptions(page.topics)
    yield from _details(page)


def _summed(page: Page) -> TimeCounts | None:
    if page.bins is None:
        return None
    total = TimeCounts.empty(page.bins)
    for counts in page.times:
        total.add(counts)
    return total


# Charts


def _charts(page: Page, topics: Sequence[TopicFigures], times: TimeCounts | None) -> str:
    cards = []
    if times is not None and page.bins is not None:
        messages = _time_columns(page.bins, times.cold_messages, times.hot_messages, _message_text)
        size = _time_columns(page.bins, times.cold_bytes, times.hot_bytes, byte_text)
        cards.append(_card("Messages over time", bar_chart("Messages over time", messages, count_text) + _WHERE))
        cards.append(_card("Bytes over time", bar_chart("Bytes over time", size, byte_text, 1024) + _WHERE))
    sizes = _size_columns(topics)
    if sizes:
        title = "Sizes of objects and files"
        cards.append(_card(title, bar_chart(title, sizes, count_text) + _WHAT))
        cards.append(_card("Hot and cold", _kept(topics)))
    note = "" if times is None else f'<p class="quiet">{_how_counted(page)}</p>'
    return f'<div class="charts">{"".join(cards)}</div>{note}' if cards else ""


def _card(title: str, content: str) -> str:
    return f'<div class="card"><h3>{escaped(title)}</h3>{content}</div>'


def _kept(topics: Sequence[TopicFigures]) -> str:
    """Where the messages are, as three bars."""
    counts = [sum(counts) for counts in zip(*(topic.kept_messages for topic in topics), strict=True)]
    total, places = sum(counts), ("in the store alone", "in both", "on this disk alone")
    lengths = [(counts[0], 0), (counts[1] / 2, counts[1] / 2), (0, counts[2])]
    rows = "".join(
        f"<tr><td>{place}</td><td>{share_bar(*lengths[index], total, counted(counts[index], 'message'))}</td>"
        f"{_number(f'{counts[index]:,}')}{_number(f'{100 * counts[index] / total:.1f} %' if total else '')}</tr>"
        for index, place in enumerate(places)
    )
    return f'<div class="scroll"><table class="kept"><tbody>{rows}</tbody></table></div>'


def _how_counted(page: Page) -> str:
    if page.is_exact:
        return "Times are counted message by message; bytes are those of keys and values."
    return "The messages of an object are spread evenly between its first and its last time; bytes are those of frames."


def _message_text(count: float) -> str:
    return counted(count, "message")


def _time_columns(
    bins: TimeBins, cold: Sequence[float], hot: Sequence[float], value_text: Callable[[float], str]
) -> list[Column]:
    columns = []
    for index in range(bins.count):
        first, last = bins.bounds_us(index)
        title = f"{moment_text(first)} to {moment_text(last)}: {value_text(cold[index] + hot[index])}"
        if hot[index]:
            title += f", {value_text(hot[index])} of it on this disk alone"
        columns.append(Column(cold[index], hot[index], title, tick_text(first, bins.width_us)))
    return columns


def _size_columns(topics: Sequence[TopicFigures]) -> list[Column]:
    """How many objects and files there are of each size, in steps of four."""
    objects = [_step_of(one.size) for topic in topics for one in topic.objects]
    files = [_step_of(one.size) for topic in topics for one in topic.files]
    steps = [*objects, *files]
    if not steps:
        return []
    return [_size_column(step, objects.count(step), files.count(step)) for step in range(min(steps), max(steps) + 1)]


def _step_of(size: int) -> int:
    """The power of four that a size is below."""
    return (size.bit_length() + 1) // 2


def _size_column(step: int, objects: int, files: int) -> Column:
    label = f"< {byte_text(4**step)}"
    return Column(objects, files, f"{label}: {counted(objects, 'object')}, {counted(files, 'file')}", label)


# Tables


def _topic_table(page: Page) -> str:
    largest = max((topic.cold_bytes + topic.hot_bytes for topic in page.topics), default=0)
    rows = "".join(_topic_row(page, index, largest) for index in _by_size(page.topics))
    heads = "".join(
        f'<th class="{"number" if is_number else "text"}">{title}</th>'
        for title, is_number in (
            *(("topic", False), ("messages", True), ("over time", False), ("store", True), ("disk", True)),
            *(("cold and hot", False), ("not shipped", True), ("lag", True), ("offsets", True)),
        )
    )
    return f'<div class="card scroll"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'


def _by_size(topics: Sequence[TopicFigures]) -> list[int]:
    """Largest first; those of the same size by name."""
    return sorted(range(len(topics)), key=lambda i: (-topics[i].cold_bytes - topics[i].hot_bytes, topics[i].name))


def _topic_row(page: Page, index: int, largest: int) -> str:
    topic = page.topics[index]
    name = f"<code>{escaped(topic.name)}</code>"
    if topic.problem is not None:
        return f'<tr><td class="name">{name}</td><td class="prose bad" colspan="8">{escaped(topic.problem)}</td></tr>'
    title = f"{byte_text(topic.cold_bytes)} in the store, {byte_text(topic.hot_bytes)} on this disk"
    cells = [
        _number(f"{topic.messages:,}"),
        f"<td>{_spark(page, index)}</td>",
        _number(byte_text(topic.cold_bytes)),
        _number(byte_text(topic.hot_bytes)),
        f"<td>{share_bar(topic.cold_bytes, topic.hot_bytes, largest, title)}</td>",
        _number(f"{topic.unshipped_messages:,}"),
        _number(f"{topic.lag_messages:,}" if topic.subscriptions else ""),
        _number(f"{topic.start_offset:,} to {topic.next_offset - 1:,}" if topic.messages else ""),
    ]
    return f'<tr><td class="name">{name}</td>{"".join(cells)}</tr>'


def _spark(page: Page, index: int) -> str:
    if page.bins is None:
        return ""
    counts = page.times[index]
    values = [cold + hot for cold, hot in zip(counts.cold_messages, counts.hot_messages, strict=True)]
    return sparkline(values, f"messages of {page.topics[index].name} over time")


def _number(text: str) -> str:
    return f'<td class="number">{escaped(text)}</td>'


def _problems(topics: Sequence[TopicFigures]) -> Iterator[str]:
    found = [topic for topic in topics if topic.problem is not None]
    if found:
        yield f'<p class="bad">{counted(len(found), "topic")} could not be looked at; the table says why.</p>'


def _subscriptions(topics: Iterable[TopicFigures]) -> Iterator[str]:
    found = [(one.lag_messages, topic.name, one) for topic in topics for one in topic.subscriptions]
    if not found:
        return
    found.sort(key=lambda entry: (-entry[0], entry[1], entry[2].name))
    largest = found[0][0]
    yield "<h2>Subscriptions</h2>"
    rows = "".join(
        f'<tr><td class="name"><code>{escaped(topic)}</code></td><td class="name"><code>{escaped(one.name)}</code></td>'
        f"<td>{escaped(one.kind)}</td>{_number(f'{one.offset:,}')}{_number(f'{lag:,}')}"
        f"<td>{share_bar(0, lag, largest, counted(lag, 'message') + ' behind')}</td>"
        f"<td>{escaped(moment_text(one.moved_us))}</td></tr>"
        for lag, topic, one in found[:_MAX_SUBSCRIPTIONS]
    )
    yield (
        '<div class="card scroll"><table><thead><tr><th>topic</th><th>subscription</th><th>kind</th>'
        '<th class="number">offset</th><th class="number">lag</th><th>behind</th><th>moved (UTC)</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
    if len(found) > _MAX_SUBSCRIPTIONS:
        yield f'<p class="quiet">The {_MAX_SUBSCRIPTIONS} slowest of {len(found):,} subscriptions.</p>'


# One topic


def _details(page: Page) -> Iterator[str]:
    """Charts of their own for the largest topics. With a single one they are those of all topics."""
    shown = [index for index in _by_size(page.topics) if page.topics[index].problem is None]
    if len(page.topics) < 2 or not shown:
        return
    yield "<h2>One by one</h2>"
    if len(shown) > page.max_details:
        yield f'<p class="quiet">The {page.max_details:,} largest of {len(shown):,} topics.</p>'
    for index in shown[: page.max_details]:
        topic = page.topics[index]
        charts = _charts(page, [topic], page.times[index] if page.bins is not None else None)
        what = f"{counted(topic.messages, 'message')}, {counted(len(topic.objects), 'object')}"
        yield (
            f'<details class="card"><summary><code>{escaped(topic.name)}</code> '
            f'<span class="quiet">{what}, {counted(len(topic.files), "file")}</span></summary>{charts}</details>'
        )
