"""A stream from topic to topic, killed with its driver, Java and workers at every step of a batch: rows come once.

These are campaigns. That a batch which comes again changes nothing, and that one who is killed while he takes rows in
is followed by the next, is shown without a second Java by test_sink_stream.py and test_hand_over.py.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.campaign import SEED

import tidelog
from tidelog.pipeline.address import find_root

PROGRAMS = Path(__file__).with_name("kill_programs")
STEPS = (
    *("before write", "in write", "before a part is published", "after write", "before commit", "before the swap"),
    *("after the swap", "before take-in", "placed", "in take-in", "appended", "taken", "after commit"),
)
STEPS_OF_A_STORE = (*STEPS, "shipped", "sealed")
RUN_SECONDS = 900
RANDOM_KILLS = 8


class Kill(NamedTuple):
    """At which step, at which time that it is reached, and who: the one process that reached it, or all."""

    step: str
    hit: int
    who: str

    def __str__(self) -> str:
        return "\t".join(map(str, self))


CHOSEN = {
    "directory": [
        *(Kill("in write", 2, "one"), Kill("after write", 2, "one"), Kill("before commit", 2, "one")),
        *(Kill("after the swap", 1, "one"), Kill("in take-in", 3, "all"), Kill("appended", 2, "one")),
    ],
    "store alone": [
        *(Kill("before the swap", 1, "one"), Kill("placed", 2, "one"), Kill("shipped", 1, "one")),
        *(Kill("taken", 1, "all"), Kill("after commit", 2, "all")),
    ],
}


@pytest.mark.long
@pytest.mark.parametrize("place", CHOSEN)
def test_every_row_comes_once(tmp_path: Path, place: str) -> None:
    """Killed in the middle of writing, committing and taking in, and started again: nothing is lost or doubled."""
    kill_and_compare(tmp_path, place, CHOSEN[place])
    ran = (tmp_path / "ran").read_text("utf-8").splitlines()
    assert all(line.endswith("killed") for line in ran), f"a step was never reached: {ran}"


@pytest.mark.long
@pytest.mark.parametrize("place", [*CHOSEN, "directory with a store"])
def test_every_row_comes_once_wherever_it_is_killed(tmp_path: Path, place: str) -> None:
    """The same at steps that the seed of the campaign chooses."""
    kill_and_compare(tmp_path, place, random_kills(place))


def kill_and_compare(tmp_path: Path, place: str, kills: list[Kill]) -> None:
    """Both topics have the same rows at the end."""
    sink = make_sink(tmp_path, place)
    run_and_kill(tmp_path, sink, kills)
    rows = contents(str(tmp_path / "source"), "shop/from")
    assert rows == [(b"row %d" % number, b"%d" % (number % 5)) for number in range(len(kills) * 120)]
    assert contents(sink, "shop/to") == rows


def random_kills(place: str) -> list[Kill]:
    """As many as are wanted, of all steps."""
    chosen, steps = random.Random(SEED), STEPS if place == "directory" else STEPS_OF_A_STORE
    return [
        Kill(chosen.choice(steps), chosen.randint(1, 3), chosen.choice(("one", "one", "one", "one", "all")))
        for _ in range(RANDOM_KILLS)
    ]


def make_sink(directory: Path, place: str) -> str:
    """A directory, one with a store, or a store alone."""
    store = f"file://{directory}/store"
    if place == "store alone":
        return store
    if place == "directory with a store":
        with tidelog.open(directory / "sink", store=store, metadata="bucket"):
            pass
    return str(directory / "sink")


def contents(root: str, topic: str) -> list[tuple[bytes, bytes | None]]:
    """All messages of a topic."""
    with find_root(root).open() as log:
        return [(message.value or b"", message.key) for message in log.topic(topic).read()]


def run_and_kill(directory: Path, sink: str, kills: list[Kill]) -> None:
    """Starts the program as often as all of it was killed, and once more."""
    ran = directory / "ran"
    ran.touch()
    while not (directory / "done").exists():
        finished = len(ran.read_text("utf-8").splitlines())
        (directory / "kills").write_text("\n".join(map(str, kills[finished:])), encoding="utf-8")
        run_program(directory, sink)
        killed = directory / "killed"
        if killed.exists():
            with ran.open("a", encoding="utf-8") as log:
                log.write(killed.read_text("utf-8").replace("\n", "\t") + "\tkilled\n")
            killed.unlink()


def run_program(directory: Path, sink: str) -> None:
    """In a session of its own, which always ends by being killed."""
    places = [str(directory / "source"), sink, str(directory / "state"), str(directory / "kills")]
    path = os.pathsep.join([str(PROGRAMS / "hooks"), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        [sys.executable, str(PROGRAMS / "stream.py"), *places],
        env=os.environ | {"KILL_DIRECTORY": str(directory), "PYTHONPATH": path},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            said, _ = process.communicate(timeout=RUN_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == -signal.SIGKILL, said.decode("utf-8", "replace")[-4000:]
