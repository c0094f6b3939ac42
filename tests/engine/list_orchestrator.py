"""An orchestrator over a list, for tests of driving an engine."""

from __future__ import annotations

from collections.abc import Iterator

from tidelog.engine.txn.read_set import Carried
from tidelog.errors import GapError


class ListOrchestrator:
    """A log in memory that can be truncated at both ends."""

    def __init__(self, entries: dict[int, Carried] | None = None) -> None:
        self.log: dict[int, Carried] = dict(entries or {})
        self.mark = 0
        self.truncations: list[int] = []
        self.first_seq = 1
        self.asked: list[int] = []

    def low_water_mark(self) -> int:
        return self.mark

    def entries(self, after_seq: int, up_to: int | None = None) -> Iterator[tuple[int, Carried]]:
        self.asked.append(after_seq)
        if after_seq + 1 < self.first_seq:
            raise GapError("truncated", first=after_seq + 1, last=self.first_seq - 1)
        for seq, entry in sorted(self.log.items()):
            if seq > after_seq and (up_to is None or seq <= up_to):
                yield seq, entry

    def truncate(self, seq: int) -> None:
        self.truncations.append(seq)


class ForgetfulOrchestrator(ListOrchestrator):
    """One that tells where its log stopped being what it was."""

    def __init__(self, entries: dict[int, Carried] | None = None) -> None:
        super().__init__(entries)
        self.agreed = 1 << 62

    def agreed_seq(self, applied_seq: int) -> int:
        return min(applied_seq, self.agreed)
