"""The checker finds each anomaly that is planted in a good history, and nothing in the good one."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
from tests.cluster.chaos.checker import Promises, by_check, check
from tests.cluster.chaos.history import (
    Append,
    Commit,
    Committed,
    EndOffset,
    EnginePut,
    EngineRead,
    Event,
    Fault,
    Final,
    Note,
    Read,
    Recorder,
    Rescued,
    Transaction,
    read_history,
)
from tests.cluster.chaos.linearizability import (
    WITHOUT_GO,
    ask_porcupine,
    not_linearizable,
    operations,
    register_operations,
)
from tests.cluster.chaos.report import coverage, report

PROMISES = Promises(
    shipped=frozenset({"orders", "copy", "moved"}),
    synced=frozenset({"synced"}),
    read_by={"readers": "orders", "subscribers": "orders"},
    redelivers=frozenset({"subscribers"}),
    copies={"copy": "orders"},
)


def sent(topic: str, value: str, offset: int | None, transaction: str = "") -> Append:
    """Acknowledged, or with no offset unknown."""
    end, outcome = (None, "unknown") if offset is None else (offset + 0.5, "ok")
    return Append(
        topic=topic,
        partition=0,
        value=value,
        begin=0.0 if offset is None else float(offset),
        end=end,
        outcome=outcome,  # type: ignore[arg-type]
        offset=offset,
        transaction=transaction,
    )


def ended(name: str, outcome: str) -> Transaction:
    """At once."""
    return Transaction(name=name, outcome=outcome, begin=0.0, end=1.0)  # type: ignore[arg-type]


def read(*messages: tuple[int, str], life: int = 1, by: str = "readers") -> Read:
    """By a member of the group, or the consumer of the subscription."""
    return Read(topic="orders", partition=0, reader=f"{by}/one", life=life, messages=list(messages), end=1.0)


def committed(offset: int, at: float) -> Commit:
    """By the group, with an answer."""
    return Commit(group="readers", topic="orders", partition=0, offset=offset, begin=at, end=at, outcome="ok")


def asked(offset: int | None, at: float) -> Committed:
    """What the group's offset is."""
    return Committed(group="readers", topic="orders", partition=0, offset=offset, begin=at, end=at)


def final(topic: str, *messages: tuple[int, str]) -> Final:
    """A partition at the end."""
    return Final(topic=topic, partition=0, messages=list(messages))


ORDERS = ((0, "a:0"), (1, "a:1"), (2, "a:2"))
GOOD: dict[str, Event] = {
    "a:0": sent("orders", "a:0", 0),
    "a:1": sent("orders", "a:1", None),
    "a:2": sent("orders", "a:2", 2),
    "gone": sent("orders", "a:3", None),
    "orders": final("orders", *ORDERS),
    "copy": final("copy", (0, "a:1"), (1, "a:0"), (4, "a:2")),
    "read": read(*ORDERS),
    "again": read(ORDERS[2], life=2),
    "got": read(*ORDERS[:2], by="subscribers"),
    "got again": read(*ORDERS[1:], ORDERS[0], life=2, by="subscribers"),
    "commit": committed(2, 1.0),
    "asked": asked(2, 2.0),
    "m:0": sent("moved", "m:0", 0, "x"),
    "m:1": sent("moved", "m:1", 1, "x"),
    "m:2": sent("moved", "m:2", 3, "y"),
    "m:3": sent("moved", "m:3", 4, "z"),
    "x": ended("x", "committed"),
    "y": ended("y", "aborted"),
    "z": ended("z", "unknown"),
    "moved": final("moved", (0, "m:0"), (1, "m:1"), (4, "m:3")),
    "s:0": sent("synced", "s:0", 0),
    "s:1": sent("synced", "s:1", 1),
    "s:2": sent("synced", "s:2", 1),
    "synced": final("synced", (0, "s:0"), (1, "s:2")),
    "s:4": sent("ends", "s:4", 0, "v"),
    "s:5": sent("ends", "s:5", 1, "v"),
    "v": ended("v", "committed"),
    "ends": final("ends", (0, "s:4")),
    "rescued": Rescued(topic="synced", partition=0, node="n1", messages=[(1, "s:1")]),
    "fault": Fault(kind="kill", target="n1", begin=0.0, end=1.0, recovered=2.0),
    "note": Note(who="a", text="something", end=1.0),
}


def with_changes(**changes: Event) -> list[Event]:
    """The good history, with some events replaced or added."""
    return list({**GOOD, **changes}.values())


def test_checker_accepts_a_good_history() -> None:
    """Unknown messages may be there or not, an aborted one is not, a lost tail is on a disk, readers may read again."""
    assert check(GOOD.values(), PROMISES) == []


PLANTED: dict[str, tuple[str, dict[str, Event]]] = {
    "lost at the end": ("lost", {"a:9": sent("orders", "a:9", 9)}),
    "another message at its offset": ("lost", {"a:2": sent("orders", "a:2", 1)}),
    "committed and lost": ("lost", {"m:9": sent("moved", "m:9", 9, "x")}),
    "no disk has it": ("lost", {"rescued": Rescued(topic="synced", partition=0, node="n1", messages=[])}),
    "offset of two messages": ("offset used twice", {"a:9": sent("orders", "a:9", 2)}),
    "twice in a partition": ("doubled", {"orders": final("orders", *ORDERS, (3, "a:2"))}),
    "order": ("out of order", {"orders": final("orders", (0, "a:0"), (1, "a:2"), (2, "a:1"))}),
    "from nowhere": ("never sent", {"orders": final("orders", *ORDERS, (3, "b:7"))}),
    "aborted, and there": ("aborted", {"moved": final("moved", (0, "m:0"), (1, "m:1"), (3, "m:2"), (4, "m:3"))}),
    "read and gone": ("dirty read", {"read": read(*ORDERS, (3, "a:3"))}),
    "read, then another": ("dirty read", {"read": read(*ORDERS[:2], (2, "a:3"))}),
    "read backwards": ("read out of order", {"again": read(ORDERS[2], ORDERS[1], life=2)}),
    "the same again": ("read out of order", {"again": read(ORDERS[2], life=1)}),
    "skipped, and then delivered": (
        "read out of order",
        {"got": read(ORDERS[0], ORDERS[2], by="subscribers")},
    ),
    "never delivered by the subscription": (
        "missed",
        {"got again": read(ORDERS[1], life=2, by="subscribers")},
    ),
    "aborted, and there, where a tail may be lost": ("aborted", {"v": ended("v", "aborted")}),
    "an open transaction": (
        "never ended",
        {"ends": Final(topic="ends", partition=0, messages=[(0, "s:4")], unstable=2)},
    ),
    "never delivered": ("missed", {"read": read(ORDERS[0]), "again": read(ORDERS[2])}),
    "offset went back": ("went back", {"later": asked(1, 3.0)}),
    "offset is gone": ("went back", {"later": asked(None, 3.0)}),
    "an older commit was acknowledged later": ("went back", {"old": committed(1, 2.5), "later": asked(1, 3.0)}),
    "half a transaction": ("partial", {"m:3": sent("moved", "m:3", 4, "z"), "m:4": sent("moved", "m:4", 5, "z")}),
    "copied twice": ("not exactly once", {"copy": final("copy", (0, "a:0"), (1, "a:1"), (2, "a:2"), (3, "a:1"))}),
    "not copied": ("not exactly once", {"copy": final("copy", (0, "a:0"), (1, "a:1"))}),
    "copied from nowhere": ("not exactly once", {"copy": final("copy", *ORDERS, (3, "b:7"))}),
}


@pytest.mark.parametrize("name", PLANTED)
def test_checker_finds_a_planted_anomaly(name: str) -> None:
    """Each one by its kind."""
    kind, changes = PLANTED[name]
    assert kind in {anomaly.kind for anomaly in check(with_changes(**changes), PROMISES)}


def test_offset_that_was_asked_for_before_the_commit_may_be_older() -> None:
    """Only an answer that was there before the question counts."""
    assert check(with_changes(early=asked(None, 0.5), same=asked(1, 1.0)), PROMISES) == []


def test_lost_tail_is_an_anomaly_of_shipped_topics_only() -> None:
    """Offsets of a synced topic may be used again; a disk has what was at them before."""
    promises = PROMISES._replace(shipped=PROMISES.shipped | {"synced"}, synced=frozenset())
    assert {one.kind for one in check(GOOD.values(), promises)} == {"lost", "offset used twice"}


def test_history_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Line by line, each of its kind."""
    recorder = Recorder(tmp_path / "history.jsonl")
    end = EndOffset(topic="orders", partition=0, client="a", offset=3, begin=1.0, end=2.0)
    events = [*GOOD.values(), end]
    recorder.add(*events)
    recorder.close()
    with (tmp_path / "history.jsonl").open("rb") as lines:
        assert read_history(lines) == events
    assert msgspec.json.decode((tmp_path / "history.jsonl").read_bytes().splitlines()[0])["type"] == "Append"


def test_porcupine_is_asked_about_what_happened() -> None:
    """An unknown append is one if its message is there, and never ends; one that is not there is left out."""
    end = EndOffset(topic="orders", partition=0, client="b", offset=3, begin=4.0, end=5.0)
    asked_about = operations([*GOOD.values(), end], "orders")["orders/0"]
    shown = [(one["kind"], one["offset"], one["client"]) for one in asked_about]
    assert shown == [("append", 0, 0), ("append", 1, 0), ("append", 2, 0), ("end", 3, 1)]
    assert asked_about[0]["return"] == 500_000_000
    assert asked_about[1]["return"] > 1 << 50


@pytest.mark.long
def test_porcupine_finds_a_stale_read_and_a_put_that_was_wrongly_applied(tmp_path: Path) -> None:
    """Objects of an engine are registers: what was acknowledged is read, and conditions are asked of it."""

    def put(seq: int, match: int, *, is_applied: bool) -> EnginePut:
        return EnginePut(key="one", seq=seq, match=match, is_applied=is_applied, begin=seq, end=seq + 0.5)

    def got(seq: int, at: float) -> EngineRead:
        return EngineRead(key="one", client="a", seq=seq, begin=at, end=at + 0.1)

    good: list[Event] = [
        got(0, 0.0),
        put(1, 0, is_applied=True),
        put(2, 1, is_applied=True),
        put(3, 1, is_applied=False),
    ]
    histories: dict[str, list[Event]] = {
        "good": [*good, got(2, 4.0), put(5, -1, is_applied=True), got(5, 6.0)],
        "stale": [*good, got(1, 4.0)],
        "refused": [*good, put(4, 1, is_applied=True)],
    }
    asked_about = {name: register_operations(events, "e")["e/one"] for name, events in histories.items()}
    found = ask_porcupine(asked_about, tmp_path)
    if shutil.which("go") is None:
        assert set(found.values()) == {"not asked: Go is not installed"}
    else:
        assert found == {"good": "Ok", "stale": "Illegal", "refused": "Illegal"}


def test_question_that_was_not_answered_is_a_failure() -> None:
    """Loss prevented: a campaign passed when Porcupine had no time or could not be built. Without Go it says so."""
    found = not_linearizable({"a": "Ok", "b": "Illegal", "c": "Unknown", "d": "not asked: no module", "e": WITHOUT_GO})
    assert found == ["b: Illegal", "c: Unknown", "d: not asked: no module"]


def test_report_shows_what_was_found() -> None:
    """Checks with their anomalies, faults with how long they took, and what clients said."""
    events = with_changes(later=asked(1, 3.0))
    text = report("A campaign", events, by_check(events, PROMISES), {"orders/0": "Ok"}, {"seed": 7}, 5.0)
    assert "| committed offsets do not go back | **1 anomalies** |" in text
    assert "readers committed 2, and at 3.000 s it was 1" in text
    assert "| nothing is doubled | holds |" in text
    assert "| kill | 1 | 1.0 | 1.0 | 0.0 | 0.0 | 0 |" in text
    assert "| orders/0 is linearizable (Porcupine) | Ok |" in text
    assert "| a | something | 1 |" in text


def test_report_says_how_long_others_took_to_serve_what_a_dead_node_had() -> None:
    """Counted from the beginning of the fault, less the lease: the node may come back long after that."""

    def acknowledged(partition: int, *moments: float) -> list[Append]:
        return [
            Append(topic="a", partition=partition, value="1", begin=moment, end=moment, outcome="ok", offset=1)
            for moment in moments
        ]

    mine = acknowledged(0, 9.0, 10.1, 17.6, 18.0, 29.9, 31.0)
    others = acknowledged(1, *map(float, range(5, 40)))
    fault = Fault(kind="kill", target="n1", begin=10.0, end=30.0, recovered=31.5)
    text = report("A campaign", [*mine, *others, fault], {}, {}, {}, 5.0)
    assert "| kill | 1 | 1.5 | 1.5 | 14.9 | 14.9 | 0 |" in text
    sooner = acknowledged(0, 19.0, 21.0, 23.0, 25.0, 27.0)
    text = report("A campaign", [*mine, *sooner, *others, fault], {}, {}, {}, 5.0)
    assert "| kill | 1 | 1.5 | 1.5 | 2.6 | 2.6 | 0 |" in text


def test_report_says_what_the_machine_had_no_means_for() -> None:
    """Loss prevented: a report without Go, or of a process that may not mount a file system, read like any other."""
    facts = coverage({"orders/0": WITHOUT_GO, "orders/1": WITHOUT_GO}, can_fill=False)
    text = report("A campaign", [], {}, {}, facts, 5.0)
    assert "| Porcupine | not asked: Go is not installed |" in text
    assert "| full disks | left out: this process may not mount a file system |" in text
    assert coverage({"orders/0": "Ok", "orders/1": "Illegal"}, can_fill=True) == {
        "Porcupine": "asked about 2 logs and registers",
        "full disks": "among the faults",
    }
