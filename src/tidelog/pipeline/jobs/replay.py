"""The job `replay`: the messages of a topic once more, into another one, all or some of them, as they are or changed.

Invariants
- Messages arrive in the order of their offsets, each once, however often the job is killed and run again, and also when
  it runs twice at once: it goes in steps (`replay_steps.py`), and each step is one consignment (`pipeline/sink.py`).
- A run takes what is there when it begins. The next one with the same arguments goes on where it ended.
- The source is not changed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from tidelog.errors import InputError, NotFoundError
from tidelog.pipeline.consigning import write_place
from tidelog.pipeline.jobs.job import JobReport, OnProgress, Progress, ignore_progress
from tidelog.pipeline.jobs.proof import Proof
from tidelog.pipeline.jobs.replay_rows import COLUMNS, StepWriter, Written
from tidelog.pipeline.jobs.replay_steps import Step, open_steps
from tidelog.pipeline.jobs.spark_errors import told_in_our_words
from tidelog.pipeline.jobs.topic_rows import read_rows
from tidelog.pipeline.root import Root
from tidelog.tier.stores import canonical_url
from tidelog.topics.names import parse_topic_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DEFAULT_STEP_MESSAGES = 1_000_000


class ReplayReport(JobReport, frozen=True, kw_only=True):
    """What a run has written: the range of the source that was gone through, and where its rows are in the target.

    `source_first` and `source_end` are offsets of a topic, or numbers of files. The offsets of the target are None when
    nothing was written.
    """

    source: str
    target: str
    name: str
    source_first: int
    source_end: int
    steps: int
    messages: int
    target_first_offset: int | None
    target_next_offset: int | None


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which messages are taken and what becomes of them, as SQL over the columns of a topic, headers included.

    `where` is a condition. `select` are expressions, one of which is named `value`, and others `key`, `headers` and
    `timestamp` where those are to be kept.
    """

    where: str | None = None
    select: tuple[str, ...] = ()

    def of(self, rows: DataFrame) -> DataFrame:
        """The rows that are written."""
        with told_in_our_words("the selection cannot be understood"):
            if self.where is not None:
                rows = rows.where(self.where)
            chosen = rows.selectExpr(*(self.select or COLUMNS))
            _ = chosen.schema  # over Spark Connect a mistake is noticed no sooner
        return chosen


def replay(
    spark: SparkSession,
    root: Root,
    source: str,
    target: str,
    *,
    target_root: Root | None = None,
    selection: Selection | None = None,
    start_offset: int | None = None,
    end_offset: int | None = None,
    step_messages: int = DEFAULT_STEP_MESSAGES,
    name: str | None = None,
    on_progress: OnProgress = ignore_progress,
) -> ReplayReport:
    """Writes the messages of `source` into `target`, which is made when absent; its own root is that of the source.

    `name` is under which the target remembers how far it is; by default it follows from the source and the selection.
    """
    began, selection, into = time.monotonic(), selection or Selection(), target_root or root
    source, target = str(parse_topic_name(source)), str(parse_topic_name(target))
    if source == target and _store(root) == _store(into):
        raise InputError(f"{source} cannot be replayed into itself", hint="Name another topic as the target")
    if step_messages < 1:
        raise InputError(f"a step has one message at least, not {step_messages}")
    first, end = _range(root, source, start_offset, end_offset)
    identity = _identity(root, source, selection)
    name = name or f"topic-{hashlib.sha256(identity.encode()).hexdigest()[:20]}"
    # A mistake in the SQL is told before the target remembers anything of it.
    selection.of(read_rows(spark, root, {source: (first, end)}, includeHeaders=True))
    with open_steps(into, target, name, identity) as steps:
        writer, done = StepWriter(spark, into, target, steps), list[Step]()
        for step in steps.all(first, lambda at: min(at + step_messages, end)):
            on_progress(Progress(f"replaying {source}", max(0, step.first - first), end - first))
            rows = read_rows(spark, root, {source: step}, includeHeaders=True)
            writer.write(step, selection.of(rows))
            done.append(step)
    on_progress(Progress(f"replaying {source}", end - first, end - first))
    return report_of(writer, done, source, target, name, time.monotonic() - began)


def _store(root: Root) -> str:
    """Where the topics of a root are in the end: a directory and its store are two addresses of the same ones."""
    if root.directory is not None:
        root = msgspec.structs.replace(root, location=str(root.directory.resolve()))
    return canonical_url(write_place(root).store_url)


def _range(root: Root, topic: str, start_offset: int | None, end_offset: int | None) -> tuple[int, int]:
    """From where to where, as far as the topic goes now."""
    with root.open() as log:
        if not log.has_topic(topic):
            raise NotFoundError(
                f"there is no topic {topic}", path=root.location, hint="`tidelog topic list` shows them"
            )
        opened = log.topic(topic)
        earliest, latest = opened.start_offset, opened.next_offset
    first = earliest if start_offset is None else start_offset
    end = latest if end_offset is None else end_offset
    if not earliest <= first <= end <= latest:
        raise InputError(
            f"{topic} has the offsets {earliest} up to {latest} (exclusive), and {first} up to {end} were asked for"
        )
    return first, end


def _identity(root: Root, topic: str, selection: Selection) -> str:
    """What a replay is of. Where it begins and ends is not part of it: a later run goes on further."""
    parts = {"root": root.location, "topic": topic, "where": selection.where, "select": selection.select}
    return msgspec.json.encode({name: value for name, value in parts.items() if value}).decode()


def _notes(written: Written) -> Iterator[str]:
    if written.unproven_messages:
        yield f"{written.unproven_messages} messages came in beside another run of this replay, and are in its proof"


def report_of(
    writer: StepWriter, done: list[Step], source: str, target: str, name: str, seconds: float
) -> ReplayReport:
    """The report of a run, with its proof."""
    written = writer.written
    went_in, came_out = written.sides()
    return ReplayReport(
        job="replay",
        proofs=(Proof(subject=f"{source} to {target}", went_in=went_in, came_out=came_out),),
        notes=tuple(_notes(written)),
        seconds=round(seconds, 3),
        source=source,
        target=target,
        name=name,
        source_first=done[0].first if done else 0,
        source_end=done[-1].end if done else 0,
        steps=len(done),
        messages=written.came_out.messages,
        target_first_offset=written.first_offset,
        target_next_offset=written.next_offset,
    )
