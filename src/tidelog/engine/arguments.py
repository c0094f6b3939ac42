"""What callers give to an engine, looked at before anything is done: seqs, entries and names.

Invariants
- What is wrong raises InputError that names it; nothing has changed then.
- A name that no object can have (too long, with a NUL) is not wrong to ask for: there is no such object.
"""

from __future__ import annotations

from tidelog.engine.entry import PutObject, operations
from tidelog.engine.entry_codec import Carried
from tidelog.engine.guard import batch_of
from tidelog.engine.version_keys import MAX_SEQ
from tidelog.errors import InputError


def checked_seq(seq: int, *, least: int = 1) -> int:
    """The seq, if it is one."""
    if type(seq) is not int or not least <= seq <= MAX_SEQ:
        raise InputError(f"{seq!r} is not a seq: a whole number from {least} to 2**64 - 1")
    return seq


def checked_entries(entries: object) -> list[tuple[int, Carried]]:
    """The entries, if they are such, with seqs that grow. What an iterable raises by itself is its own."""
    if not hasattr(entries, "__iter__"):
        raise InputError(f"entries must be pairs of a seq and an entry, not {type(entries).__name__}")
    wanted: list[tuple[int, Carried]] = list(entries)
    before = 0
    try:
        for seq, entry in wanted:
            if checked_seq(seq) <= before:
                raise InputError(f"seq {seq} comes after {before}: entries must be in the order of their seqs")
            if type(entry) is not PutObject:
                operations(batch_of(entry))
            before = seq
    except (TypeError, ValueError) as error:
        raise InputError(f"entries must be pairs of a seq and an entry: {error}") from error
    return wanted


def check_names(bucket: object, key: object = "") -> None:
    """Names to look for are text that can be written as UTF-8."""
    for what, name in (("bucket", bucket), ("key", key)):
        if not isinstance(name, str):
            raise InputError(f"a {what} is named by text, not by {type(name).__name__}")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"the name of a {what} has half a surrogate pair in it, which is not UTF-8") from error
