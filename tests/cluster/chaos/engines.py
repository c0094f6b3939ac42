"""An engine of the cluster as registers: puts with conditions and reads at a seq, of which Porcupine is asked.

    Driving          has the log of the engine, and applies its entries, some puts at once
    EngineReading    reads what was acknowledged, from any node

Invariants
- The log gives an entry its seq once. What the engine does not have after a move, or after its node has died, is
  applied again, and its result is the one that was told before.
- The engine is never behind a truncation mark that it told: no log has these entries any more.
- A read names a seq that was acknowledged before. An engine that is behind it refuses, so that no answer is stale.
- In the end the engine is what the log makes of an engine that nothing happened to (`digest`).
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence

from tests.cluster.chaos.history import EnginePut, EngineRead, Recorder
from tests.cluster.chaos.workloads import Workload

import tidelog
from tidelog.client.engine import RemoteEngine
from tidelog.engine.entry import CreateBucket, PutObject, Result
from tidelog.errors import NotFoundError, TidelogError

ENGINE = "chaos"
KEYS = ("one", "two", "three")
_BUCKET = "registers"
_AT_ONCE = 4
_AGAIN = 500
_CONNECT_SECONDS = 20.0
_PAUSE_SECONDS = 0.1
ANY, ABSENT = -1, 0
"""A put that asks for no version, and one that asks for none to be there."""


class _Connected(Workload):
    """It goes on with the next node when one fails."""

    def __init__(self, recorder: Recorder, urls: Sequence[str], name: str, seed: int) -> None:
        super().__init__(recorder, "", name)
        self._urls = urls
        self._random = random.Random(f"{seed}/{name}")
        self._life = self._random.randrange(len(urls))

    def _go_on(self, is_done: bool = False) -> None:
        """Runs `_use` with one node after the other, until it returns."""
        while not is_done:
            url = self._urls[self._life % len(self._urls)]
            self._life += 1
            try:
                with tidelog.connect(url, timeout=_CONNECT_SECONDS) as log:
                    is_done = self._use(log.engine(ENGINE))
            except (TidelogError, TimeoutError) as error:
                self.recorder.note(self.name, type(error).__name__)
                is_done = self._is_over.is_set() and not self._must_end
                time.sleep(0.5)

    _must_end = False
    """Whether it has something to finish when it is stopped."""

    def _use(self, engine: RemoteEngine) -> bool:
        raise NotImplementedError


class Driving(_Connected):
    """The orchestrator, and those who give it their puts."""

    def __init__(self, recorder: Recorder, urls: Sequence[str], seed: int) -> None:
        super().__init__(recorder, urls, "driver", seed)
        self.acknowledged = 0
        """Up to this seq all have their results."""
        self._log: list[CreateBucket | PutObject] = [CreateBucket(_BUCKET)]
        self._results: dict[int, Result] = {}
        self._versions = dict.fromkeys(KEYS, ABSENT)
        self._truncated = 0

    _must_end = True

    def _run(self) -> None:
        self._go_on()

    def _use(self, engine: RemoteEngine) -> bool:
        self._catch_up(engine)
        while not self._is_over.wait(_PAUSE_SECONDS):
            self._put_some(engine)
            if self._random.random() < 0.1:
                engine.update_low_water_mark(self.acknowledged)
                self._look(engine)
        self._compare(engine)
        return True

    def _look(self, engine: RemoteEngine) -> int:
        """Where the engine is."""
        applied, truncated = engine.applied_seq, engine.truncation_mark
        if applied < self._truncated:
            self.fatal.append(f"the engine is at seq {applied}, and had told the truncation mark {self._truncated}")
        self._truncated = max(self._truncated, truncated)
        return applied

    def _catch_up(self, engine: RemoteEngine) -> None:
        """Applies what the engine does not have, and what has no result yet."""
        begin = min(self._look(engine), self.acknowledged)
        while begin < len(self._log):
            some = list(enumerate(self._log[begin : begin + _AGAIN], begin + 1))
            self._told(engine.apply_many(some))
            begin += len(some)

    def _told(self, results: Sequence[Result]) -> None:
        for result in results:
            before = self._results.get(result.seq)
            if result.status == "unverified":
                continue
            if before is not None and before.status != result.status:
                self.fatal.append(f"seq {result.seq} was {before.status}, and is {result.status}")
            self._results[result.seq] = result
        self.acknowledged = max(self.acknowledged, results[-1].seq)

    def _put_some(self, engine: RemoteEngine) -> None:
        """Of clients that do not know of each other: some of their conditions do not hold."""
        begin, first = self.recorder.now(), len(self._log) + 1
        asked: list[tuple[int, str, int]] = []
        for seq in range(first, first + self._random.randint(1, _AT_ONCE)):
            key = self._random.choice(KEYS)
            match = self._random.choice((self._versions[key], self._versions[key], ABSENT, ANY))
            conditions = {"if_absent": True} if match == ABSENT else {} if match == ANY else {"if_match": match}
            self._log.append(PutObject(_BUCKET, key, str(seq).encode(), **conditions))
            asked.append((seq, key, match))
        is_first = True
        while self.acknowledged < len(self._log):
            try:
                if is_first:
                    is_first = False
                    self._told(engine.apply_many(list(enumerate(self._log[first - 1 :], first))))
                else:
                    self._catch_up(engine)
            except (TidelogError, TimeoutError) as error:
                self.recorder.note(self.name, type(error).__name__)
                time.sleep(0.5)
        end = self.recorder.now()
        for seq, key, match in asked:
            result = self._results.get(seq)
            is_applied = result.status == "applied" if result else match in (ANY, self._versions[key])
            if is_applied:
                self._versions[key] = seq
            put = EnginePut(key=key, seq=seq, match=match, is_applied=is_applied, begin=begin, end=end)
            self.recorder.add(put)

    def _compare(self, engine: RemoteEngine) -> None:
        with tempfile.TemporaryDirectory() as directory, tidelog.open_engine(directory) as reference:
            reference.apply_many(list(enumerate(self._log, 1)))
            self._catch_up(engine)
            if engine.digest() != reference.digest():
                self.fatal.append("the engine is not what its log makes of it")


class EngineReading(_Connected):
    """One read after the other, each at what is acknowledged by then."""

    def __init__(self, recorder: Recorder, urls: Sequence[str], name: str, seed: int, driver: Driving) -> None:
        super().__init__(recorder, urls, name, seed)
        self._driver = driver

    def _run(self) -> None:
        self._go_on()

    def _use(self, engine: RemoteEngine) -> bool:
        while not self._is_over.wait(_PAUSE_SECONDS):
            if self._driver.acknowledged:
                self._read(engine)
        return True

    def _read(self, engine: RemoteEngine) -> None:
        key, begin = self._random.choice(KEYS), self.recorder.now()
        try:
            found = engine.read(_BUCKET, key, self._driver.acknowledged)
            seq = int(found.data)
            if found.seq != seq:
                self.fatal.append(f"{key} has the value of seq {seq}, and says {found.seq}")
        except NotFoundError as error:
            if "no engine" in str(error):
                raise
            seq = ABSENT
        self.recorder.add(EngineRead(key=key, client=self.name, seq=seq, begin=begin, end=self.recorder.now()))
