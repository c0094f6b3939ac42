"""Runs the benchmarks one after the other, each in a process of its own, and prints one table.

python bench/run.py [NAME ...] [--quick] [--dir .] [--json]
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from measuring import Figure, at_least, parser_for

from tidelog._native import CRC32_BY

HERE = Path(__file__).resolve().parent
# Name, and what makes it quick where one only wants to see that it works.
BENCHMARKS = {
    "scan_frames": ["--megabytes", "8"],
    "columns": ["--rounds", "3"],
    "append_vs_jetstream": ["--messages", "20000", "--rounds", "1"],
    "sync_append": ["--seconds", "0.2", "--rounds", "1"],
    "read_back": ["--messages", "50000", "--rounds", "1"],
    "reopen": ["--megabytes", "128", "--rounds", "1"],
    "many_topics": ["--topics", "200", "--idle-seconds", "0.5"],
    "slow_reader": ["--messages", "50000"],
    "history_read": ["--megabytes", "64", "--rounds", "1"],
    "subscriptions": ["--messages", "20000", "--rounds", "1"],
    "spark": ["--megabytes", "64", "--rounds", "1"],
    "compact": ["--objects", "100", "--rounds", "1"],
    "ship": ["--megabytes", "64", "--rounds", "1", "--seconds", "1"],
    "engine": [
        *("--entries", "5120", "--rounds", "1", "--recovery-megabytes", "32", "--zipf-objects", "20000"),
        *("--zipf-reads", "5000", "--stream-megabytes", "64", "--scan-entries", "20480"),
    ],
    "engine_pipeline": ["--entries", "20000", "--keys", "4000"],
}
# More than this of one core taken by others, and figures of two cores are no longer about us.
BUSY_LOAD = 0.5
HEADINGS = ("measured", "tidelog", "peer", "value", "target", "")


def run(name: str, options: list[str]) -> dict[str, Any]:
    """The result of one benchmark."""
    command = [sys.executable, str(HERE / f"{name}.py"), "--json", *options]
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    result: dict[str, Any] = json.loads(finished.stdout)
    return result


def figures_of(name: str, result: dict[str, Any]) -> list[Figure]:
    """The lines of the table."""
    if name != "scan_frames":
        return [Figure(**figure) for figure in result["figures"]]
    by_size = {int(row["payload_bytes"]): row for row in result["sizes"]}
    speed, gain = by_size[1024]["kernel_gb_per_s"], by_size[100]["kernel_over_twin"]
    zlib = by_size[1024]["zlib_crc32_gb_per_s"]
    twin_ns, kernel_ns = by_size[100]["twin_ns_per_frame"], by_size[100]["kernel_ns_per_frame"]
    return [
        at_least("scan of 1 KiB frames", f"{speed:.1f} GB/s", f"zlib's crc32 alone {zlib:.1f} GB/s", speed, 1, " GB/s"),
        at_least("scan of 100-byte frames", f"{kernel_ns:.0f} ns a frame", f"in Python {twin_ns:.0f} ns", gain, 20),
    ]


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "crc32_by": CRC32_BY,
        "load_before": round(os.getloadavg()[0], 2),
    }


def row_of(figure: Figure) -> tuple[str, ...]:
    """A figure as texts."""
    verdict = "ok" if figure.met else "missed"
    return figure.what, figure.ours, figure.peer, f"{figure.value:.2f}", figure.target, verdict


def print_table(figures: list[Figure]) -> None:
    """All figures, in columns."""
    rows = [HEADINGS, *map(row_of, figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main() -> None:
    """Runs and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(BENCHMARKS)} (all)")
    parser.add_argument("--quick", action="store_true", help="small runs: to see that they work, not for figures")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    found_on = machine()
    if found_on["load_before"] > BUSY_LOAD:
        print("the machine is busy: these figures will say more about that than about tidelog", file=sys.stderr)
    results, figures = {}, []
    for name in arguments.names or BENCHMARKS:
        print(f"running {name}", file=sys.stderr)
        place = [] if name == "scan_frames" else ["--dir", str(arguments.dir)]
        results[name] = run(name, place + (BENCHMARKS[name] if arguments.quick else []))
        figures += figures_of(name, results[name])
    if arguments.json:
        print(json.dumps({"machine": found_on, "results": results}, indent=2))
    else:
        print(", ".join(f"{key} {value}" for key, value in found_on.items()) + "\n")
        print_table(figures)


if __name__ == "__main__":
    main()
