"""Offsets whose message a compaction has removed: they keep the log contiguous, and nobody is shown them.

Their frame has the single byte 1 as its payload. No message has such a payload, and it is not the byte that marks a
lost offset (`repair.py`): what is lost is told as a gap, what was removed on purpose is passed over without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

REMOVED_PAYLOAD = b"\x01"


def is_removed(payload: bytes) -> bool:
    """Whether a payload only marks an offset whose message a compaction has removed."""
    return payload == REMOVED_PAYLOAD


def kept_runs(payloads: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """The stretches between those that were removed, as (start, stop), stop exclusive."""
    start = 0
    for index, payload in enumerate(payloads):
        if payload == REMOVED_PAYLOAD:
            if start < index:
                yield start, index
            start = index + 1
    if start < len(payloads):
        yield start, len(payloads)
