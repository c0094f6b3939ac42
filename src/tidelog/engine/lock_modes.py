"""The modes of a lock, as sets of bits: a mode has the bits of every mode that it covers.

    IS   0001   reads some keys of the bucket
    IX   0011   writes some keys of the bucket
    S    0101   reads all of it
    SIX  0111   reads all of it, writes some keys: what a holder of one of S and IX has when it asks for the other
    X    1111   writes all of it

So `held & wanted == wanted` says that `held` is enough, and `held | wanted` is the weakest mode that covers both.
"""

from __future__ import annotations

from typing import Final

IS: Final = 0b0001
IX: Final = 0b0011
S: Final = 0b0101
SIX: Final = 0b0111
X: Final = 0b1111

NAMES: Final = {IS: "IS", IX: "IX", S: "S", SIX: "SIX", X: "X"}

COMPATIBLE: Final[dict[int, frozenset[int]]] = {
    IS: frozenset((IS, IX, S, SIX)),
    IX: frozenset((IS, IX)),
    S: frozenset((IS, S)),
    SIX: frozenset((IS,)),
    X: frozenset(),
}
"""Which modes others may hold beside one."""


def intention_of(mode: int) -> int:
    """What a bucket has to be locked with before one of its keys is locked in `mode`."""
    return IX if mode & ~S else IS
