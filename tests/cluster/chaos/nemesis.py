"""Misfortunes of a campaign, chosen by a seed: one at a time, sometimes two at once, each healed before the next.

Invariants
- The same seed makes the same choices in the same order. When they come depends on how long recovery takes.
- A majority of etcd stays; what is cut off is healed; a disk that was filled is freed; a clock goes back to the truth.
- A node that ended by itself is started again, and that is in the history: it is an anomaly of its own.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from tests.cluster.chaos.history import Fault, Recorder
from tests.cluster.chaos.machines import MEMBERS, NODES, WAIT_SECONDS, Machines, patiently, until
from tests.cluster.chaos.network import How, Path

from tidelog.cluster.documents import ClusterState
from tidelog.errors import InputError

MAX_SECONDS = 12.0
_CLOCK_SECONDS = 7200.0
_PAIRS = 0.25
_OPERATION_SECONDS = 120.0


class Misfortune(NamedTuple):
    """What, to whom, for how long; `detail` says how, or of whom else."""

    kind: str
    target: str
    seconds: float
    detail: str = ""


class Nemesis:
    """Chooses and does."""

    def __init__(
        self,
        machines: Machines,
        recorder: Recorder,
        topics: list[tuple[str, int]],
        engines: list[str],
        seed: int,
    ) -> None:
        self._machines = machines
        self._recorder = recorder
        self._topics = topics
        self._engines = engines
        self._random = random.Random(seed)
        self._do: dict[str, Callable[[Misfortune], None]] = {
            "kill": self._kill,
            "stop": self._stop,
            "pause": self._pause,
            "cut from etcd": self._cut_from_etcd,
            "cut from bucket": self._cut_from_bucket,
            "cut from nodes": self._cut_from_nodes,
            "clock": self._clock,
            "disk full": self._disk_full,
            "drain": self._drain,
            "move": self._move,
            "move engine": self._move_engine,
            "balance": self._balance,
            "etcd member stopped": self._etcd_stop,
            "etcd member paused": self._etcd_pause,
            "bucket paused": self._bucket_pause,
        }
        self._kinds = list(self._do)
        if not machines.can_fill:
            self._kinds.remove("disk full")
        self._bag: list[str] = []
        self.unexpected: list[str] = []
        self._guard = threading.Lock()

    # Choosing

    def choose(self) -> list[Misfortune]:
        """The next one, or two of different nodes. Every kind comes before one comes again; kills and pauses twice."""
        victims = self._random.sample(NODES, len(NODES))
        count = 2 if self._random.random() < _PAIRS else 1
        chosen: list[Misfortune] = []
        for victim in victims[:count]:
            if not self._bag:
                self._bag = [*self._kinds, "kill", "pause"]
                self._random.shuffle(self._bag)
            chosen.append(self._one(self._bag.pop(), victim))
        return chosen

    def _one(self, kind: str, victim: str) -> Misfortune:
        seconds = self._random.uniform(0.5, MAX_SECONDS)
        if kind.startswith("cut"):
            return Misfortune(kind, victim, seconds, self._random.choice(["silence", "refusal"]))
        if kind.startswith("etcd"):
            return Misfortune(kind, str(self._random.randrange(MEMBERS)), seconds)
        if kind == "clock":
            return Misfortune(kind, victim, seconds, f"{self._random.uniform(-_CLOCK_SECONDS, _CLOCK_SECONDS):.0f}")
        if kind == "move engine":
            return Misfortune(kind, victim, 0.0, self._random.choice(self._engines))
        if kind == "move":
            topic, partitions = self._random.choice(self._topics)
            return Misfortune(kind, victim, 0.0, f"{topic} {self._random.randrange(partitions)}")
        return Misfortune(kind, victim, seconds)

    # Doing

    def strike(self, misfortunes: list[Misfortune], is_served: Callable[[float], bool]) -> bool:
        """All of them at once, to their ends; then waits until everything is served again. Whether it is: if not, that
        is an anomaly of its own."""
        with ThreadPoolExecutor(len(misfortunes)) as pool:
            spans = list(pool.map(self._timed, misfortunes))
        self.restart_ended()
        healed = max(end for _, end in spans)
        is_whole = until(self._machines.is_whole) and until(lambda: is_served(healed))
        recovered = self._recorder.now() if is_whole else None
        for misfortune, (begin, end) in zip(misfortunes, spans, strict=True):
            kind, target, _, detail = misfortune
            self._recorder.add(
                Fault(kind=kind, target=target, begin=begin, end=end, recovered=recovered, detail=detail)
            )
        if not is_whole:
            what = ", ".join(f"{one.kind} {one.target} {one.detail}".rstrip() for one in misfortunes)
            self.unexpected.append(f"not served again {WAIT_SECONDS:g} s after: {what}")
        return is_whole

    def _timed(self, misfortune: Misfortune) -> tuple[float, float]:
        begin = self._recorder.now()
        self._recorder.note("nemesis", f"{misfortune.kind} {misfortune.target} {misfortune.detail}")
        self._do[misfortune.kind](misfortune)
        return begin, self._recorder.now()

    def restart_ended(self) -> None:
        """Nodes that ended by themselves."""
        for name, machine in self._machines.nodes.items():
            if not machine.is_running:
                assert machine.process is not None
                self.unexpected.append(f"{name} ended with {machine.process.returncode}")
                self._recorder.note(name, self.unexpected[-1])
                machine.start()

    def _kill(self, what: Misfortune) -> None:
        machine = self._machines.nodes[what.target]
        machine.kill()
        time.sleep(what.seconds)
        machine.start()

    def _stop(self, what: Misfortune) -> None:
        machine = self._machines.nodes[what.target]
        machine.stop()
        machine.start()

    def _pause(self, what: Misfortune) -> None:
        machine = self._machines.nodes[what.target]
        machine.signal(signal.SIGSTOP)
        time.sleep(what.seconds)
        machine.signal(signal.SIGCONT)

    def _cut(self, what: Misfortune, paths: list[Path]) -> None:
        how: How = "silence" if what.detail == "silence" else "refusal"
        self._machines.network.cut(how, *paths)
        time.sleep(what.seconds)
        self._machines.network.heal(*paths)

    def _cut_from_etcd(self, what: Misfortune) -> None:
        self._cut(what, [*self._machines.to_etcd(what.target)])

    def _cut_from_bucket(self, what: Misfortune) -> None:
        self._cut(what, [*self._machines.to_bucket(what.target)])

    def _cut_from_nodes(self, what: Misfortune) -> None:
        others = [name for name in NODES if name != what.target]
        self._cut(what, [path for other in others for path in self._machines.between(what.target, other)])

    def _clock(self, what: Misfortune) -> None:
        machine = self._machines.nodes[what.target]
        machine.set_clock(float(what.detail))
        time.sleep(what.seconds)
        machine.set_clock(0.0)

    def _disk_full(self, what: Misfortune) -> None:
        disk = self._machines.nodes[what.target].disk
        disk.fill()
        time.sleep(what.seconds)
        disk.free()

    def _drain(self, what: Misfortune) -> None:
        operations = self._machines.operations
        try:
            patiently(lambda: operations.drain(what.target))
        except InputError as error:
            self._recorder.note("nemesis", f"{what.target} was not drained: {error}")
            return
        is_empty = self._until(operations.is_empty(what.target))
        patiently(lambda: operations.undrain(what.target))
        if not is_empty:
            self._recorder.note("nemesis", f"{what.target} was not drained in {_OPERATION_SECONDS:g} s")

    def _move(self, what: Misfortune) -> None:
        topic, partition = what.detail.split()
        operations = self._machines.operations
        request = patiently(lambda: operations.move(topic.replace(".", "/", 1), int(partition), what.target))
        self._until(operations.is_carried_out(request))

    def _move_engine(self, what: Misfortune) -> None:
        operations = self._machines.operations
        request = patiently(lambda: operations.move_engine(what.detail, what.target))
        self._until(operations.is_carried_out(request))

    def _balance(self, what: Misfortune) -> None:
        operations = self._machines.operations
        request = patiently(operations.balance)
        self._until(operations.is_carried_out(request))

    def _until(self, is_so: Callable[[ClusterState], bool]) -> bool:
        return patiently(lambda: self._machines.operations.until(is_so, _OPERATION_SECONDS))

    def _etcd_stop(self, what: Misfortune) -> None:
        with self._guard:  # a majority stays
            self._machines.etcd.stop_member(int(what.target))
            time.sleep(what.seconds)
            self._machines.etcd.start_member(int(what.target))
            self._machines.etcd._wait()

    def _etcd_pause(self, what: Misfortune) -> None:
        with self._guard:
            pid = self._machines.etcd.pids[int(what.target)]
            os.kill(pid, signal.SIGSTOP)
            time.sleep(what.seconds)
            os.kill(pid, signal.SIGCONT)

    def _bucket_pause(self, what: Misfortune) -> None:
        pid = self._machines.store.pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(what.seconds)
        os.kill(pid, signal.SIGCONT)
