"""What all benchmarks share: arguments, a scratch directory on the right disk, medians, and one shape of result.

A result is a list of figures: what was measured, ours, the peer's, and the target it is held to. `run.py` gathers them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Figure:
    """One line of the table. `value` is what the target speaks of: often a ratio of ours to the peer's."""

    what: str
    ours: str
    peer: str
    value: float
    target: str
    met: bool


def at_least(what: str, ours: str, peer: str, value: float, target: float, unit: str = "x") -> Figure:
    """A figure that should be large."""
    return Figure(what, ours, peer, value, f">= {target:g}{unit}", value >= target)


def at_most(what: str, ours: str, peer: str, value: float, target: float, unit: str = "x") -> Figure:
    """A figure that should be small."""
    return Figure(what, ours, peer, value, f"<= {target:g}{unit}", value <= target)


def parser_for(description: str | None) -> argparse.ArgumentParser:
    """The arguments that every benchmark takes."""
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
    """Lets the disk finish what the measurement before left to it, so that nobody pays for the other."""
    os.sync()


def percentile(sorted_values: Sequence[float], percent: float) -> float:
    """The value that so many percent are not above."""
    return sorted_values[min(len(sorted_values) - 1, int(len(sorted_values) * percent / 100))]


def report(name: str, figures: Sequence[Figure], details: object, *, as_json: bool) -> None:
    """Prints the result of one benchmark."""
    if as_json:
        print(
            json.dumps({"name": name, "figures": [asdict(figure) for figure in figures], "details": details}, indent=2)
        )
        return
    for figure in figures:
        verdict = "ok" if figure.met else "missed"
        print(f"{figure.what}: {figure.ours}, {figure.peer}; {figure.value:.2f} (target {figure.target}, {verdict})")
