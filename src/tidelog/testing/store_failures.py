"""How a store in a network fails.

    unavailable   no answer, and nothing was done
    unanswered    it was done, and the answer was lost: the caller sees the same as with `unavailable`
    late          nothing was done yet, the caller sees the same again, and it is done later (`land_late_writes`)
    denied        the credentials are refused
    conflict      somebody else was first, says the store; nothing was done
    not_found     the store says that there is no such object
    truncated     the answer has fewer bytes than the object
    flipped       one bit of the answer is wrong

A call that only reads has nothing to do late or unanswered: there all of the first three are alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tidelog.errors import AccessDeniedError, ConflictError, NotFoundError, StoreUnavailableError, TidelogError
from tidelog.testing.faults import Failure

StoreFault = Literal["unavailable", "unanswered", "late", "denied", "conflict", "not_found", "truncated", "flipped"]
STORE_FAULTS: tuple[StoreFault, ...] = get_args(StoreFault)
DAMAGES: frozenset[StoreFault] = frozenset({"truncated", "flipped"})


@dataclass(kw_only=True)
class StoreFailure(Failure):
    """What some calls of a store meet. `at_byte` says where an answer is cut or wrong; by default in its middle."""

    fault: StoreFault = "unavailable"
    at_byte: int | None = None

    @property
    def is_damage(self) -> bool:
        """Whether the caller gets an answer, and a wrong one."""
        return self.fault in DAMAGES

    def matches(self, path: str) -> bool:
        """A call may be about several keys; one of them is enough."""
        return any(map(super().matches, path.split(",")))

    def damaged(self, data: bytes) -> bytes:
        """What arrives in place of this. An answer that does not reach as far as `at_byte` arrives as it is."""
        at = len(data) // 2 if self.at_byte is None else self.at_byte
        if self.fault == "truncated":
            return data[:at]
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if at < len(data) else data

    def as_error(self, path: str) -> TidelogError:
        """The error that a real store's client would raise."""
        assert not self.is_damage
        if self.fault == "denied":
            return AccessDeniedError(f"{path}: access is denied")
        if self.fault == "conflict":
            return ConflictError(f"{path}: somebody else was first", hint="Read it again and decide")
        if self.fault == "not_found":
            return NotFoundError(f"{path}: there is no such object")
        return StoreUnavailableError(f"{path}: the store is not available")
