"""What all benchmarks share: arguments, a scratch directory on the right disk, rounds, and one shape of result.

A result is a list of figures: what was measured, ours, the peer's, and the target it is held to. `run.py` gathers them.
Contenders take turns, since the speed of a machine changes from minute to minute: medians count, and the rounds stay in
the figure, so that a reader sees how far they are apart. A peer that is not installed is named, and nothing fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import TypeVar

Contender = TypeVar("Contender")
UNSETTLED = "BENCH_UNSETTLED"
_KINDS = ("driver", "java", "worker")
MOST_HELD_MIB = 1024


class MissingPeerError(Exception):
    """A peer is not on this machine; the message says how it gets there."""


@dataclass(frozen=True)
class Figure:
    """One line of the table. `value` is what the target speaks of: often a ratio of ours to the peer's.

    `durability` says when an answer of either side counts, where that matters: accepted, in the file, synced, in the
    store. The rounds are what each side reached in each of them, in the unit of `ours`.
    """

    what: str
    ours: str
    peer: str
    value: float
    target: str
    met: bool
    durability: str = ""
    ours_rounds: tuple[float, ...] = ()
    peer_rounds: tuple[float, ...] = ()


def at_least(
    what: str,
    ours: str,
    peer: str,
    value: float,
    target: float,
    unit: str = "x",
    *,
    durability: str = "",
    rounds: tuple[Sequence[float], Sequence[float]] = ((), ()),
) -> Figure:
    """A figure that should be large."""
    met = value >= target
    return Figure(what, ours, peer, value, f">= {target:g}{unit}", met, durability, *map(tuple, rounds))


def at_most(
    what: str,
    ours: str,
    peer: str,
    value: float,
    target: float,
    unit: str = "x",
    *,
    durability: str = "",
    rounds: tuple[Sequence[float], Sequence[float]] = ((), ()),
) -> Figure:
    """A figure that should be small."""
    met = value <= target
    return Figure(what, ours, peer, value, f"<= {target:g}{unit}", met, durability, *map(tuple, rounds))


def alternate(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each of them reached in each round. Each round begins with the next one, so nobody is always first."""
    names = list(contenders)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            settle()
            found[name].append(contenders[name]())
    return found


def compared(
    what: str,
    found: Mapping[str, Sequence[float]],
    peer: str,
    target: float,
    *,
    ours: str = "tidelog",
    unit: str = " msg/s",
    digits: int = 0,
    durability: str = "",
    smaller_is_better: bool = False,
) -> Figure:
    """Ours beside a peer's, by the medians of their rounds. The value says how many times as good ours is."""
    mine, theirs = median(found[ours]), median(found[peer])
    value = theirs / mine if smaller_is_better else mine / theirs
    return Figure(
        what,
        f"{mine:,.{digits}f}{unit}",
        f"{peer} {theirs:,.{digits}f}{unit}",
        value,
        f">= {target:g}x",
        value >= target,
        durability,
        tuple(found[ours]),
        tuple(found[peer]),
    )


def spread(rounds: Sequence[float]) -> float:
    """How far the rounds are from their median, at most, as a part of it."""
    middle = median(rounds)
    return max(max(rounds) - middle, middle - min(rounds)) / middle if middle else 0.0


def those_here(
    makers: Mapping[str, Callable[[], Contender]], missing: list[str], *, stack: contextlib.ExitStack | None = None
) -> dict[str, Contender]:
    """The peers that this machine has, made (and entered into `stack`); the others are named in `missing`."""
    found = {}
    for name, make in makers.items():
        try:
            one = make()
        except (MissingPeerError, ImportError) as error:
            missing.append(f"{name}: {error}")
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        found[name] = one
        if stack is not None:
            stack.enter_context(one)  # type: ignore[arg-type]
    return found


def program(name: str, *places: Path, remedy: str) -> str:
    """The path of a program: beside this Python, on the path of the shell, or in one of these places."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        found = next((str(place / name) for place in places if (place / name).exists()), None)
    if found is None:
        raise MissingPeerError(f"{name} is not installed: {remedy}")
    return found


def parser_for(description: str | None) -> argparse.ArgumentParser:
    """The arguments that every benchmark takes. It is the first call of each: from here on a polite end (SIGTERM) is an
    exit, which stops servers and removes scratch data.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(), help="scratch data goes below it (the working directory)")
    parser.add_argument("--json", action="store_true", help="figures for programs")
    return parser


@contextlib.contextmanager
def scratch_directory(below: Path) -> Iterator[Path]:
    """A directory for the data of one benchmark; it is gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix=".tidelog-bench-", dir=below)).resolve()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def settle() -> None:
    """Lets the disk finish what the measurement before left to it, so that nobody pays for the other.

    Where nobody wants figures (`run.py --scale` below 0.01) the disk of a busy machine is not waited for.
    """
    if not os.environ.get(UNSETTLED):
        os.sync()


def cpu_seconds(*excluded: int) -> float:
    """CPU time of this process and all that it started, but for processes that are named, and those that they started.

    On a machine that others use, too, it says more than the time on the wall.
    """
    ticks, parents = dict[int, int](), dict[int, int]()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid, fields = int(entry.name), (entry / "stat").read_text().rpartition(")")[2].split()
            parents[pid] = int(fields[1])
            ticks[pid] = sum(map(int, fields[11:15]))  # of its own, and of children that have ended
    wanted, added = {os.getpid()}, {os.getpid()}
    while added:
        added = {pid for pid, parent in parents.items() if parent in added and pid not in excluded}
        wanted |= added
    return sum(ticks[pid] for pid in wanted if pid in ticks) / os.sysconf("SC_CLK_TCK")


def _processes(*excluded: int) -> dict[str, list[Path]]:
    """What /proc has of this process and those that it started, by what they are; without those that are named."""
    parents, names = dict[int, int](), dict[int, str]()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, KeyError):
            lines = dict(line.split(":", 1) for line in (entry / "status").read_text().splitlines())
            parents[int(entry.name)], names[int(entry.name)] = int(lines["PPid"]), lines["Name"].strip()
    found: dict[str, list[Path]] = {kind: [] for kind in _KINDS}
    ours, added = set[int](), {os.getpid()}
    while added:
        ours |= added
        added = {pid for pid, parent in parents.items() if parent in added and pid not in excluded}
    for pid in ours:
        kind = "driver" if pid == os.getpid() else "java" if names.get(pid) == "java" else "worker"
        found[kind].append(Path(f"/proc/{pid}"))
    return found


def forget_most_memory(*excluded: int) -> None:
    """Processes begin to count again from what they hold now."""
    for entry in chain.from_iterable(_processes(*excluded).values()):
        with contextlib.suppress(OSError):
            (entry / "clear_refs").write_text("5")


def most_memory(*excluded: int) -> dict[str, int]:
    """The most MiB that the driver, Java and the largest worker have held since then."""
    most = dict[str, int]()
    for kind, entries in _processes(*excluded).items():
        for entry in entries:
            with contextlib.suppress(OSError, KeyError):
                lines = dict(line.split(":", 1) for line in (entry / "status").read_text().splitlines())
                most[kind] = max(most.get(kind, 0), int(lines["VmHWM"].split()[0]) >> 10)
    return most


def memory_of(what: str, found: Mapping[str, int]) -> Figure:
    """What a job held, beside what a driver or a worker may: it must not grow with the data."""
    ours = ", ".join(f"{kind.capitalize() if kind == 'java' else kind} {found.get(kind, 0):,}" for kind in _KINDS)
    held = max(found.get("driver", 0), found.get("worker", 0))
    return at_most(what, f"{ours} MiB", "the larger of driver and worker", held, MOST_HELD_MIB, " MiB")


def percentile(sorted_values: Sequence[float], percent: float) -> float:
    """The value that so many percent are not above."""
    return sorted_values[min(len(sorted_values) - 1, int(len(sorted_values) * percent / 100))]


def report(
    name: str, figures: Sequence[Figure], details: object, *, as_json: bool, missing: Sequence[str] = ()
) -> None:
    """Prints the result of one benchmark."""
    if as_json:
        shown = [asdict(figure) for figure in figures]
        print(json.dumps({"name": name, "figures": shown, "details": details, "missing": list(missing)}, indent=2))
        return
    for figure in figures:
        verdict = "ok" if figure.met else "missed"
        print(f"{figure.what}: {figure.ours}, {figure.peer}; {figure.value:.2f} (target {figure.target}, {verdict})")
