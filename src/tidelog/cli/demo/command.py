"""`tidelog demo`: demonstrates the guarantees of the log, and proves each of them.

Each step does what a user would do, and then proves the result. A failed proof is shown as such and makes the exit code
1. Nothing outside the demo's own directory is touched.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from tidelog.cli.demo import steps as play
from tidelog.cli.demo.cluster import lose_a_node
from tidelog.cli.demo.cluster import why_not as no_cluster
from tidelog.cli.demo.serving import Server, meet, serving, stay, why_not
from tidelog.cli.demo.steps import Bucket, Step
from tidelog.cli.errors import ExitCode, program
from tidelog.cli.output import Output, say
from tidelog.cli.pipeline.job import spark_for
from tidelog.cli.session import Session, command
from tidelog.errors import InputError
from tidelog.files import explained, refuse_link

DEFAULT_DIRECTORY = Path("tidelog-demo")
DemoDirectoryOption = Annotated[
    Path | None,
    typer.Option("--dir", "-d", metavar="DIR", readable=False, help="Where it works [default: ./tidelog-demo]."),
]
_MARKER = "made-by-tidelog-demo"
_LIVE, _DAMAGED, _BUCKET, _TABLE, _CLUSTER = "live", "damaged", "bucket", "table", "cluster"
_NODES = ("node-a", "node-b", "node-c")
_ENGINES = ("engine", "engine-restored", "engine-by-spark")


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    command(app, "demo", DemoDirectoryOption)(demo)


def demo(
    session: Session,
    messages: Annotated[int, typer.Option("--messages", "-n", metavar="N", min=100, help="How many.")] = 200_000,
    local: Annotated[
        bool, typer.Option("--local", help="Without the parts that need a bucket, Spark or etcd.")
    ] = False,
    spark: Annotated[bool, typer.Option("--spark/--no-spark", help="With the part that needs Spark.")] = True,
    serve: Annotated[
        bool, typer.Option("--serve", help="On a terminal, leave the console running at the end.")
    ] = False,
) -> None:
    """Shows what tidelog promises, and proves each claim. Appends, tails, crashes, repairs, ships, prunes, loses a disk
    and restores it.

    The same with an engine: entries, old states, a lost disk, equal digests. Then Spark queries the bucket, writes a
    topic, verifies, compacts, makes a table, leaves a page to look at, and compacts and restores the engine. Three
    nodes form a cluster, and one of them is killed. At last a client of Kafka and HTTP meet the log through `tidelog
    serve`; with --serve its console stays. The demo starts an S3 server of its own (SeaweedFS), takes about a minute,
    and works in ./tidelog-demo, or in --dir, which it clears of an earlier demo first. The exit code is 1 when a proof
    fails.
    """
    directory = session.directory or DEFAULT_DIRECTORY
    prepare(directory)
    started = time.monotonic()
    steps = _run(session.output, directory, messages)
    if not local:
        steps += _run_with_bucket(session.output, directory, steps, with_spark=spark)
        steps += _run_with_cluster(session.output, directory, len(steps))
    with _serving(session.output, directory, steps) as server:
        _conclude(session, directory, steps, time.monotonic() - started)
        if serve and server is not None:
            stay(server)
    if not _is_proven(steps):
        raise typer.Exit(ExitCode.FOUND_WRONG)


def _is_proven(steps: list[Step]) -> bool:
    return all(is_true for step in steps for is_true in step.proofs.values())


def _conclude(session: Session, directory: Path, steps: list[Step], seconds: float) -> None:
    if session.as_json:
        _write_document(session, directory, steps, seconds, _is_proven(steps))
    else:
        _write_summary(session.output, directory, steps, seconds, _is_proven(steps))


def prepare(directory: Path) -> None:
    """An empty place for the demo. What is not known to come from an earlier demo is never removed."""
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file", hint="Name another directory with --dir")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / _MARKER).is_file():
        raise InputError(
            f"{directory} is not empty and was not made by the demo", hint="Name another directory with --dir"
        )
    directory.mkdir(parents=True, exist_ok=True)
    with explained("demo", directory):
        refuse_link(directory / _MARKER)
        (directory / _MARKER).touch()
        for name in (_LIVE, _DAMAGED, _BUCKET, _TABLE, _CLUSTER, *_NODES, *_ENGINES):
            refuse_link(directory / name)
            if (directory / name).exists():
                shutil.rmtree(directory / name)


def _run(output: Output, directory: Path, messages: int) -> list[Step]:
    live, damaged = directory / _LIVE, directory / _DAMAGED
    narrator = _Narrator(output)
    narrator.begin(f"Appending {messages:,} messages with keys and headers, while another thread tails them")
    with output.progress("appending", messages) as on_done:
        appended = play.append_and_tail(live, messages, on_done)
    narrator.end(appended.step)
    acknowledged_target = max(100, messages // 20)
    narrator.begin("Starting a process that appends synced messages from 8 threads, and killing it with SIGKILL")
    with output.progress("crashing", acknowledged_target) as on_done:
        crashed = play.crash(live, acknowledged_target, on_done)
    narrator.end(crashed.step)
    narrator.begin("Opening the log again and reading all of it")
    with output.progress("reading", messages + len(crashed.acknowledged)) as on_done:
        reread = play.reread(live, appended, crashed, on_done)
    narrator.end(reread)
    narrator.begin("Flipping one bit in a copy of the log, finding it, and repairing the copy")
    mended = play.damage_and_repair(live, damaged)
    narrator.end(mended)
    return [appended.step, crashed.step, reread, mended]


def _run_with_bucket(output: Output, directory: Path, before: list[Step], *, with_spark: bool) -> list[Step]:
    narrator = _Narrator(output, len(before))
    total = next(int(str(step.numbers["recovered"])) for step in before if "recovered" in step.numbers)
    node_a, node_b, node_c = (directory / name for name in _NODES)
    shutil.copytree(directory / _LIVE, node_a, ignore=shutil.ignore_patterns("lock", ".lock"))
    narrator.begin("Starting an S3 server, shipping the log to a bucket, pruning the disk and reading all of it again")
    with play.bucket(directory / _BUCKET, output) as place:
        with output.progress("reading", total) as on_done:
            shipped, content = play.ship_and_prune(node_a, place, on_done)
        narrator.end(shipped)
        narrator.begin("Deleting the whole directory, and continuing from the bucket alone in another one")
        with output.progress("restoring", total) as on_done:
            restored = play.lose_and_restore(node_a, node_b, place, content, on_done)
        narrator.end(restored)
        narrator.begin("Letting a second node take the topic over while the first still has it open")
        fenced = play.fence(node_b, node_c, place)
        narrator.end(fenced)
        steps = [shipped, restored, fenced, *_run_engine(output, narrator, directory, place)]
        # Two more were appended: one after the loss of the disk, one by the new owner.
        return steps + (_run_with_spark(output, narrator, directory, place, total + 2) if with_spark else [])


def _run_engine(output: Output, narrator: _Narrator, directory: Path, place: Bucket) -> list[Step]:
    engine, restored = (directory / name for name in _ENGINES[:2])
    count = play.ENTRIES
    narrator.begin(f"Applying {count:,} entries to an engine, shipping them to the bucket, and reading old states")
    with output.progress("applying", count) as on_done:
        applied, known = play.apply_and_ship(engine, place, count, on_done)
    narrator.end(applied)
    narrator.begin("Deleting the engine's directory, and restoring the engine from the bucket")
    with output.progress("restoring", 2) as on_done:
        rebuilt = play.lose_engine_and_restore(engine, restored, place, known, on_done)
    narrator.end(rebuilt)
    return [applied, rebuilt]


def _run_with_spark(output: Output, narrator: _Narrator, directory: Path, place: Bucket, messages: int) -> list[Step]:
    problem = play.why_no_spark()
    if problem is not None:
        narrator.remark(f"The part with Spark is left out: {problem}")
        return []
    narrator.begin("Starting Spark, and querying the bucket in SQL")
    with spark_for(output, "demo", "local[2]") as spark, output.progress("working with Spark", 5) as on_done:
        on_done(1)
        queried = play.query_bucket(spark, place, messages)
        on_done(2)
        narrator.end(queried)
        narrator.begin("Writing a result from Spark to another topic, beside the process that owns it")
        written = play.write_topic(spark, directory / _NODES[2], place)
        on_done(3)
        narrator.end(written)
        narrator.begin("Verifying every frame in the bucket, compacting it, and making a table and a page of it")
        done = play.run_jobs(spark, directory, place)
        on_done(4)
        narrator.end(done)
        narrator.begin(
            "Compacting the engine's log, removing what is no longer needed, and restoring the engine, with Spark"
        )
        restored, again = (directory / name for name in _ENGINES[1:])
        collected = play.collect_with_spark(spark, restored, again, place)
        on_done(5)
        narrator.end(collected)
    return [queried, written, done, collected]


def _run_with_cluster(output: Output, directory: Path, steps_before: int) -> list[Step]:
    narrator = _Narrator(output, steps_before)
    problem = no_cluster()
    if problem is not None:
        narrator.remark(f"The part with several nodes is left out: {problem}")
        return []
    narrator.begin("Starting three nodes over etcd and a bucket, and killing one with SIGKILL while it has messages")
    survived = lose_a_node(directory / _CLUSTER)
    narrator.end(survived)
    return [survived]


@contextlib.contextmanager
def _serving(output: Output, directory: Path, steps: list[Step]) -> Iterator[Server | None]:
    """Adds the step that serves the log of the first steps; the server runs while the block does."""
    narrator = _Narrator(output, len(steps))
    problem = why_not()
    if problem is not None:
        narrator.remark(f"The part with the server is left out: {problem}")
        yield None
        return
    narrator.begin("Serving the log to a client of Kafka, to curl and to a browser")
    with serving(directory / _LIVE) as server:
        steps.append(meet(server))
        narrator.end(steps[-1])
        yield server


class _Narrator:
    """Tells the story line by line: on stdout, or on stderr when stdout is for JSON."""

    def __init__(self, output: Output, steps_before: int = 0) -> None:
        self._stream = sys.stderr if output.as_json else sys.stdout
        self._number = steps_before

    def begin(self, text: str) -> None:
        self._number += 1
        self._say(f"{self._number}. {text}", "   ")

    def end(self, step: Step) -> None:
        for text in step.findings:
            self._say(f"   {text}", "     ")
        for claim, is_true in step.proofs.items():
            self._say(f"   {'proven' if is_true else 'FAILED'}: {claim}", "     ")

    def remark(self, text: str) -> None:
        self._say(f"   {text}", "     ")

    def _say(self, text: str, indent: str) -> None:
        say(text, self._stream, indent)


def _write_document(session: Session, directory: Path, steps: list[Step], seconds: float, is_proven: bool) -> None:
    numbers = {name: value for step in steps for name, value in step.numbers.items()}
    proofs = {claim: is_true for step in steps for claim, is_true in step.proofs.items()}
    session.output.document(
        {"directory": str(directory), "seconds": seconds, "is_proven": is_proven, "proofs": proofs, **numbers}
    )


def _write_summary(output: Output, directory: Path, steps: list[Step], seconds: float, is_proven: bool) -> None:
    numbers = {name: value for step in steps for name, value in step.numbers.items()}
    proofs = [is_true for step in steps for is_true in step.proofs.values()]
    print()
    output.record({**numbers, "seconds": seconds, "proofs": f"{sum(proofs)} of {len(proofs)} hold"})
    print(f"\n{'All proofs hold.' if is_proven else 'SOME PROOFS FAILED.'} Try next:")
    for line in further_commands(program(), directory):
        print(f"  {line}")


def further_commands(name: str, directory: Path) -> list[str]:
    """What to try next, ready to be pasted."""
    live, damaged = (shlex.quote(str(directory / part)) for part in (_LIVE, _DAMAGED))
    return [
        f"{name} topic list --dir {live}",
        f"{name} consume demo/orders --dir {live} --from -5 --json",
        f"{name} inspect demo/orders --dir {live} --offset 42",
        f"{name} verify --dir {live}",
        f"{name} consume demo/orders --dir {damaged} --skip-gaps | wc -l",
        f"seq 1000000 | {name} produce my/numbers",
        f"{name} bench append --sync",
    ]
