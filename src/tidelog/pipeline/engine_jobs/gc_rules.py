"""Which objects of an engine may go: rules over names and over what is referenced, and why they hold for ever.

    pack, index file, root   of a generation that is published, and the published root and no listed state names it
    data file                of a seq that is compacted, and the published body index does not name it
    part of a state          of an earlier seq than the newest listed state, and no listed state names it
    state                    older than the newest listed one, not listed, and nobody is left who could list it

Why that needs neither a claim nor a clock: a compaction is published on the generation before it or not at all, a state
is listed behind the newest one or not at all, and whether a body has a file is decided once, when it is compacted for
the first time. So what falls under a rule now falls under it at any later time, whoever publishes, restores or owns the
engine meanwhile: a collection that slept between looking and deleting deletes nothing that came to be needed.

Invariants
- Nothing goes because something could not be read: with an unreadable root or state, all of these stay.
- A name that is not ours stays.
- What was superseded stays for a time of grace all the same, for whoever reads it without having pinned it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tidelog.tier.keys import EngineKeys

# fmt: off
Kind = Literal[
    "history", "raw log", "below start", "orphan", "replaced", "unfinished", "state", "state part", "pack", "index",
    "root", "data file", "foreign",
]
# fmt: on
Action = Literal["remove", "move", "keep", "LOST", "DAMAGED"]

_UNPUBLISHED = "of a compaction that is not published: somebody is at work, or will repeat it"
_RECENT = "superseded not long ago: readers may be at it"
_UNREADABLE = "what is referenced is not known, since a root or a state cannot be read"


class Garbage(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was found. `move` is the start of history, which is no object."""

    kind: Kind
    action: Action
    key: str
    bytes: int | None = None
    why: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether something that should be there is not, or not as it should."""
        return self.action in ("LOST", "DAMAGED")


class References(msgspec.Struct, frozen=True, kw_only=True):
    """What a manifest leads to, data files apart: sizes by key, and the numbers that the rules compare with."""

    epoch: int
    generation: int = 0
    compacted_seq: int = 0
    newest_state: tuple[int, int] = (0, 0)
    superseded_us: int = 0
    sizes: dict[str, int] = {}
    leaving: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def is_recent(self, now_us: int, grace_seconds: float) -> bool:
        """Whether what was referenced before may still be read by somebody."""
        return now_us - self.superseded_us < grace_seconds * 1_000_000


def judged(key: str, size: int, references: References, keys: EngineKeys, *, is_recent: bool) -> Garbage | None:
    """What becomes of an object that is neither of the log nor a data file; None for one that is referenced."""
    if key in references.sizes:
        return None
    kind, may_go, why = _rule(key, references, keys)
    # Who reads a state has pinned it, and then it is not leaving.
    is_recent = is_recent and key not in references.leaving
    return _verdict(kind, key, size, references, may_go=may_go, why=why, is_recent=is_recent)


def judged_data(key: str, size: int, references: References, keys: EngineKeys, *, is_recent: bool) -> Garbage:
    """What becomes of a data file that the published body index does not name."""
    name = keys.parse_data_file(key)
    if name is None:
        return Garbage(kind="foreign", action="keep", key=key, bytes=size, why="not a name of ours")
    may_go = bool(references.generation) and name.seq <= references.compacted_seq
    why = "the body index does not name it" if may_go else _UNPUBLISHED
    return _verdict("data file", key, size, references, may_go=may_go, why=why, is_recent=is_recent)


def _verdict(
    kind: Kind, key: str, size: int, references: References, *, may_go: bool, why: str, is_recent: bool
) -> Garbage:
    if may_go and references.problems:
        return Garbage(kind=kind, action="keep", key=key, bytes=size, why=_UNREADABLE)
    if may_go and is_recent:
        return Garbage(kind=kind, action="keep", key=key, bytes=size, why=_RECENT)
    return Garbage(kind=kind, action="remove" if may_go else "keep", key=key, bytes=size, why=why)


def _rule(key: str, references: References, keys: EngineKeys) -> tuple[Kind, bool, str]:
    compacted = keys.parse_compacted(key)
    if compacted is not None:
        kind: Kind = compacted.kind if compacted.kind in ("pack", "root") else "index"
        if compacted.generation > references.generation:
            return kind, False, _UNPUBLISHED
        return kind, True, f"the compaction of generation {references.generation} does without it"
    part = keys.parse_state_part(key)
    if part is not None:
        if part.seq >= references.newest_state[0]:
            return "state part", False, "of a state that is not listed: somebody is at work, or will repeat it"
        return "state part", True, "no listed state has it"
    return _rule_of_state(key, references, keys)


def _rule_of_state(key: str, references: References, keys: EngineKeys) -> tuple[Kind, bool, str]:
    state = keys.parse_checkpoint(key)
    if state is None:
        return "foreign", False, "not a name of ours"
    if key in references.leaving:
        return "state", True, "it is written down to be deleted"
    if (state.seq, state.lsn) >= references.newest_state:
        return "state", False, "not listed: somebody is at work, or will repeat it"
    if not state.digest and state.epoch >= references.epoch:
        return "state", False, "not listed, and its owner may be about to"
    return "state", True, "it is not listed, and nobody can list it any more"
