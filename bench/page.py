"""Writes docs/benchmarks.md and its plots from the results of `run.py`.

The text around the figures is in `benchmarks.txt` beside this file; every number on the page comes from the results.
A page from a busy machine, or from a small run, says so at its head.

python bench/page.py [--results build/bench/results.json] [--docs docs]
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plots
from measuring import Figure
from run import BENCHMARKS, BUSY_LOAD, FULL, MEMORY, RESULTS, ROOT, TABLE, around, figures_of

TEXT = Path(__file__).with_name("benchmarks.txt")
# Those of the table that are other systems; elsewhere ours is compared with itself.
PEERS = re.compile(
    r"(JetStream|Redis|Kafka|rocksdb|lmdb|sqlite|slatedb|parquet|tuples|obstore|write|ready|plain)", re.IGNORECASE
)
PICTURE = """<picture>
  <source media="(prefers-color-scheme: dark)" srcset="benchmarks/{name}-dark.svg">
  <img src="benchmarks/{name}-light.svg" alt="{words}">
</picture>
"""


class Page:
    """What was found, as a document."""

    def __init__(self, results: dict[str, Any]) -> None:
        self._machine = results["machine"]
        self._found: dict[str, dict[str, Any]] = {
            one.name: results["results"][one.name] for one in TABLE if one.name in results["results"]
        }

    def text(self) -> str:
        """All of it."""
        head, _, foot = TEXT.read_text("utf-8").partition("<!-- figures -->\n")
        return "\n".join([head + self._measured_on(), *self._plots(), *self._sections(), self._left_out() + foot])

    def drawings(self) -> dict[str, str]:
        """The plots by their file names."""
        rows, grown = list(self.ratios()), self._growth()
        found = {}
        for name, theme in plots.THEMES.items():
            if rows:
                found[f"ratios-{name}.svg"] = plots.ratios(rows, theme)
            if grown:
                found[f"growth-{name}.svg"] = plots.growth(grown, theme)
        return found

    def ratios(self) -> Iterator[tuple[str, float]]:
        """Operations that are compared with another system, and how many times as good ours is."""
        for result in self._found.values():
            for figure in figures_of(result):
                peer = PEERS.match(figure.peer)
                if peer is None or not figure.target.endswith("x") or figure.value <= 0:
                    continue
                durability = f" ({figure.durability})" if figure.durability else ""
                value = figure.value if figure.target.startswith(">=") else 1 / figure.value
                yield f"{figure.what}{durability}, {_name_of(figure)}", value

    def _growth(self) -> dict[str, dict[str, list[float]]]:
        found = {}
        for name in ("growth", "growth_spark", "growth_jobs"):
            for operation, seconds in (self._found.get(name, {}).get("details") or {}).items():
                found[operation] = seconds["processor_s"]
        return found

    def _measured_on(self) -> str:
        machine = self._machine
        dates = sorted({one["date"] for one in self._found.values()})
        scales = sorted({one["scale"] for one in self._found.values() if "scale" in one})
        is_full = all(scale >= FULL for scale in scales)
        command = (
            "make bench-full" if is_full else "python bench/run.py --scale " + ", ".join(map("{:g}".format, scales))
        )
        said = (
            f"Measured on {' and '.join(dates)} by `{command}` on a virtual machine: {machine['cores']} cores "
            f"({machine['processor']}), {machine['memory_gib']} GiB of memory, {machine['system']}, Python "
            f"{machine['python']}.\n"
        )
        versions = ", ".join(f"{name} {version}" for name, version in machine.get("peers", {}).items())
        said += f"\nBeside it: {versions}.\n" if versions else ""
        # What jobs hold in memory is the same on a busy machine.
        timed = [one for name, one in self._found.items() if BENCHMARKS[name].section != MEMORY]
        load = max((one.get("load_before", machine["load_before"]) for one in timed), default=0.0)
        if load > machine["cores"] * BUSY_LOAD or not is_full:
            sizes = ", ".join(f"{scale:g}" for scale in scales)
            said += (
                f"\n> **These are the figures of a busy machine**: the load of {machine['cores']} cores was {load:g} "
                f"before it began, and the sizes were {sizes} of the full ones. They show that everything runs, and "
                "little else.\n"
            )
        return said

    def _plots(self) -> Iterator[str]:
        if any(True for _ in self.ratios()):
            yield PICTURE.format(name="ratios", words="How many times as good as each peer; the tables below have it.")
        if self._growth():
            yield PICTURE.format(name="growth", words="Time against size; the table of growth has it.")

    def _sections(self) -> Iterator[str]:
        for section in dict.fromkeys(one.section for one in TABLE):
            named = [name for name, result in self._found.items() if BENCHMARKS[name].section == section]
            rows = [row for name in named for row in map(_row, figures_of(self._found[name]))]
            if not rows:
                continue
            head = "| measured | durability | tidelog | beside it | value | target |\n|---|---|---|---|---|---|\n"
            commands = "\n".join(self._command(name) for name in named if figures_of(self._found[name]))
            yield f"## {section}\n\n{head}" + "\n".join(rows) + f"\n\n{commands}\n"

    def _command(self, name: str) -> str:
        options = shlex.join(self._found[name].get("options", ()))
        return f"    python bench/{BENCHMARKS[name].program or name}.py {options}".rstrip()

    def _left_out(self) -> str:
        lines = [
            *(f"- {name}: {result['failed']}" for name, result in self._found.items() if "failed" in result),
            *sorted({f"- {words}" for result in self._found.values() for words in result.get("missing", ())}),
            *(f"- {one.name}: not in this run" for one in TABLE if one.name not in self._found),
        ]
        return "## What is not here\n\n" + "\n".join(lines) + "\n\n" if lines else ""


def _name_of(figure: Figure) -> str:
    """The peer without its figures."""
    return re.split(r" (?=[\d.,]+)", figure.peer)[0]


def _row(figure: Figure) -> str:
    target = figure.target if figure.met else f"{figure.target}, **missed**"
    ours, peer = f"{figure.ours}{around(figure.ours_rounds)}", f"{figure.peer}{around(figure.peer_rounds)}"
    return f"| {figure.what} | {figure.durability} | {ours} | {peer} | {figure.value:,.2f} | {target} |"


def main() -> None:
    """Writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="what run.py wrote")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where benchmarks.md goes")
    arguments = parser.parse_args()
    page = Page(json.loads(arguments.results.read_text("utf-8")))
    folder = arguments.docs / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    for name, drawing in page.drawings().items():
        (folder / name).write_text(drawing, "utf-8")
    (arguments.docs / "benchmarks.md").write_text(page.text(), "utf-8")


if __name__ == "__main__":
    main()
