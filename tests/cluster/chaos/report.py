"""The report of a campaign, for people: what was done, what was found, how long clients waited."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from tests.cluster.chaos.checker import Anomaly
from tests.cluster.chaos.history import Append, EnginePut, EngineRead, Event, Fault, Note, Read, Transaction
from tests.cluster.chaos.linearizability import NOT_ASKED

_EXAMPLES = 10
NEMESIS = "nemesis"


def report(
    title: str,
    events: Sequence[Event],
    checks: Mapping[str, Sequence[Anomaly]],
    linearizable: Mapping[str, str],
    facts: Mapping[str, object],
    lease_seconds: float,
) -> str:
    """Markdown."""
    parts = [[f"# {title}", ""], _facts(facts), _checks(checks, linearizable), _operations(events)]
    parts += [_faults(events, lease_seconds), _pauses(events), _notes(events)]
    return "\n".join(line for part in parts for line in part) + "\n"


def coverage(linearizable: Mapping[str, str], *, can_fill: bool) -> dict[str, str]:
    """Facts: what was looked at and done only where the machine has the means."""
    not_asked = sorted({result for result in linearizable.values() if result.startswith(NOT_ASKED)})
    return {
        "Porcupine": "; ".join(not_asked) or f"asked about {len(linearizable)} logs and registers",
        "full disks": "among the faults" if can_fill else "left out: this process may not mount a file system",
    }


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Markdown, with an empty line after it."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines, ""]


def _facts(facts: Mapping[str, object]) -> list[str]:
    return table(("", ""), facts.items())


def _checks(checks: Mapping[str, Sequence[Anomaly]], linearizable: Mapping[str, str]) -> list[str]:
    rows = [(name, "holds" if not found else f"**{len(found)} anomalies**") for name, found in checks.items()]
    rows += [(f"{name} is linearizable (Porcupine)", result) for name, result in sorted(linearizable.items())]
    lines = ["## Checks", "", *table(("check", "result"), rows)]
    for name, found in checks.items():
        if found:
            lines += [f"### {name}", "", *(f"- {one.where}: {one.kind}: {one.text}" for one in found[:_EXAMPLES]), ""]
    return lines


def _operations(events: Sequence[Event]) -> list[str]:
    appends = Counter((event.topic, event.outcome) for event in events if isinstance(event, Append))
    read = Counter[str]()
    for event in events:
        if isinstance(event, Read):
            read[event.reader.partition("/")[0]] += len(event.messages)
    ended = Counter(event.outcome for event in events if isinstance(event, Transaction))
    rows: list[tuple[str, object]] = [
        (f"appends to {topic}: {outcome}", n) for (topic, outcome), n in sorted(appends.items())
    ]
    rows += [(f"messages read by {group}", count) for group, count in sorted(read.items())]
    rows += [(f"transactions {outcome}", count) for outcome, count in sorted(ended.items())]
    puts = Counter("applied" if event.is_applied else "refused" for event in events if isinstance(event, EnginePut))
    rows += [(f"puts of the engine {outcome}", count) for outcome, count in sorted(puts.items())]
    rows.append(("reads of the engine", sum(isinstance(event, EngineRead) for event in events)))
    return ["## Operations", "", *table(("what", "count"), rows)]


def _faults(events: Sequence[Event], lease_seconds: float) -> list[str]:
    by_kind: dict[str, list[Fault]] = defaultdict(list)
    for event in events:
        if isinstance(event, Fault):
            by_kind[event.kind].append(event)
    acknowledged = _acknowledged(events)
    rows = []
    for kind, faults in sorted(by_kind.items()):
        healed = [(one, one.recovered) for one in faults if one.recovered is not None]
        waits = [recovered - one.end for one, recovered in healed]
        taken = [_served_again(acknowledged, one.begin, recovered, lease_seconds) for one, recovered in healed]
        rows.append(
            (kind, len(faults), *_middle_and_longest(waits), *_middle_and_longest(taken), len(faults) - len(waits))
        )
    head = ("fault", "count", "until served, median s", "longest s", "after it began, median s", "longest s", "never")
    text = (
        "`until served` counts from the end of the fault until every partition has acknowledged again. "
        "`after it began` counts from its beginning, less the lease, until the longest pause of any partition was "
        "over: so long others took to serve what a dead node had."
    )
    return ["## Faults", "", text, "", *table(head, rows)]


def _middle_and_longest(seconds: Sequence[float]) -> tuple[str, str]:
    ordered = sorted(seconds)
    return (f"{ordered[len(ordered) // 2]:.1f}", f"{ordered[-1]:.1f}") if ordered else ("-", "-")


def _served_again(
    acknowledged: Mapping[str, Sequence[float]], begin: float, recovered: float, lease_seconds: float
) -> float:
    """When the longest pause after `begin` was over, counted from then, less the lease."""
    longest, over = 0.0, begin
    for times in acknowledged.values():
        seen = times[bisect_right(times, begin) : bisect_right(times, recovered)]
        for before, after in pairwise([begin, *seen, recovered]):
            if after - before > longest:
                longest, over = after - before, after
    return max(0.0, over - begin - lease_seconds)


def _acknowledged(events: Sequence[Event]) -> dict[str, list[float]]:
    """When each partition acknowledged something."""
    found: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if isinstance(event, Append) and event.outcome == "ok" and event.end is not None:
            found[f"{event.topic}/{event.partition}"].append(event.end)
    return {place: sorted(times) for place, times in sorted(found.items())}


def _pauses(events: Sequence[Event]) -> list[str]:
    """The longest times in which a partition acknowledged nothing."""
    rows = []
    for place, times in _acknowledged(events).items():
        gaps = sorted((after - before, before) for before, after in pairwise(times))
        shown = ", ".join(f"{gap:.1f} s at {when:.0f}" for gap, when in reversed(gaps[-3:]))
        rows.append((place, len(times), shown))
    return ["## Longest pauses", "", *table(("partition", "acknowledged", "pauses"), rows)]


def _notes(events: Sequence[Event]) -> list[str]:
    """What clients and nodes said, most frequent first."""
    notes = Counter(
        (event.who, event.text[:200]) for event in events if isinstance(event, Note) and event.who != NEMESIS
    )
    rows = [(who, text.replace("|", "/"), count) for (who, text), count in notes.most_common(40)]
    return ["## Notes", "", *table(("who", "what", "times"), rows)]
