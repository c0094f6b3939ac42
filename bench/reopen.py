"""How long it takes to open a large log again: with its checkpoint, without it, and a plain scan of the same files.

The files are in the system's cache, so this compares work and not the disk. With the checkpoint only the newest
`open_check_bytes` are read again; without it, everything is.

python bench/reopen.py [--megabytes 1024] [--rounds 5] [--dir .] [--json]
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

from filled_topic import TOPIC, fill, plain_scan_seconds, wal_paths
from measuring import at_most, parser_for, report, scratch_directory

import tidelog
from tidelog.log.directory import CHECKPOINT
from tidelog.log.settings import LogSettings

VALUE_BYTES = 1024
MEGABYTE = 1 << 20


def open_seconds(directory: Path, *, checkpoint: bool) -> float:
    """Seconds until the topic can be appended to. Closing writes the checkpoint again."""
    if not checkpoint:
        (directory / TOPIC / CHECKPOINT).unlink()
    begin = time.perf_counter()
    log = tidelog.open(directory)
    topic = log.topic(TOPIC)
    seconds = time.perf_counter() - begin
    statistics = topic.statistics().log
    assert statistics is not None
    # A small log is read again whole, checkpoint or not.
    is_large = sum(path.stat().st_size for path in wal_paths(directory)) > 2 * LogSettings().open_check_bytes
    assert statistics.recovery.checkpoint_used is (checkpoint and is_large)
    log.close()
    return seconds


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("--megabytes", type=int, default=1024, help="size of the log in MiB (1024)")
    parser.add_argument("--rounds", type=int, default=5, help="how often; the median counts (5)")
    arguments = parser.parse_args()
    rounds = []
    with scratch_directory(arguments.dir) as scratch:
        fill(scratch, arguments.megabytes * MEGABYTE // (VALUE_BYTES + 40), VALUE_BYTES)
        size = sum(path.stat().st_size for path in wal_paths(scratch))
        for _ in range(arguments.rounds):
            rounds.append(
                (
                    plain_scan_seconds(scratch),
                    open_seconds(scratch, checkpoint=False),
                    open_seconds(scratch, checkpoint=True),
                )
            )
    scan, without, with_checkpoint = (median(column) for column in zip(*rounds, strict=True))
    peer = f"plain scan {scan * 1000:.0f} ms"
    size_text = f"{size / MEGABYTE:.0f} MiB"
    figures = [
        at_most(f"open {size_text}", f"{with_checkpoint * 1000:.0f} ms", peer, with_checkpoint, 0.5, " s"),
        at_most(f"open {size_text}, no checkpoint", f"{without * 1000:.0f} ms", peer, without / scan, 2),
    ]
    details = {"bytes": size, "scan_s": scan, "with_checkpoint_s": with_checkpoint, "without_checkpoint_s": without}
    report("reopen", figures, details, as_json=arguments.json)


if __name__ == "__main__":
    main()
