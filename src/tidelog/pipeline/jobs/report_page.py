"""The page of a report: one file with everything inside, readable without scripts and without a network.

Invariants
- It is well-formed XML and HTML at once, and its own policy forbids scripts and whatever is elsewhere.
- Foreign text is escaped where it is put in, never before and never later.
- It grows with the number of topics: a row for each, charts of their own for the largest ones alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from tidelog.pipeline.jobs.report_charts import Column, bar_chart, share_bar, sparkline
from tidelog.pipeline.jobs.report_figures import TopicFigures
from tidelog.pipeline.jobs.report_style import STYLE
from tidelog.pipeline.jobs.report_text import byte_text, count_text, counted, escaped, moment_text, tick_text
from tidelog.pipeline.jobs.report_times import TimeBins, TimeCounts

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
