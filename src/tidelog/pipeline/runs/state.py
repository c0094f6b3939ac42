"""The state of a pipeline in its store: who runs it, how far its run is, when its steps were done, and the reports.

    {root}/storage/pipelines/{name}                            the document, in the metadata store
    storage/pipelines/{name}/runs/{run}/{task:05}.json         the report of a task of a run
    storage/pipelines/{name}/runs/{run}/report.json            the report of the run

Invariants
- One run at a time. Who runs a pipeline says so in the document, and renews it; one that does not renew it for a
  lease, or has died on this machine, has lost it. Every change names its holder: a run that was taken over changes
  nothing more and ends with LeaseLostError.
- A run is in the document from its begin to its end, with its tasks and what became of them. A run that was killed is
  continued by the next one: tasks that are done are not done again. The one that was at work is, and every job comes to
  the same end then.
- The report of a task is in the store before the task counts as done.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from tidelog.clock import Clock
from tidelog.cold.lease import boot_id
from tidelog.errors import HeldError, Hint, LeaseLostError, TidelogError
from tidelog.pipeline.work import kept_alive
from tidelog.store.document import VersionedDocument, decode_json, encode_json
from tidelog.store.keys import pipeline_key, pipeline_runs_prefix
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.object_store import ObjectStore

Status = Literal["waiting", "done", "found", "failed", "skipped"]
"""`found`: it was taken to its end, and something is wrong with what it looked at or made."""
LEASE_SECONDS = 60.0
_US = 1_000_000


class TaskState(msgspec.Struct, frozen=True, kw_only=True):
    """One step on one place, for a table on one topic (None: those that its turn finds), and what became of it."""

    step: str
    on: str
    topic: str | None = None
    status: Status = "waiting"
    attempts: int = 0
    seconds: float = 0.0
    message: str | None = None
    error: str | None = None
    """The class of the error that ended it."""

    @property
    def subject(self) -> str:
        return self.on if self.topic is None else f"{self.on} {self.topic}"


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """A run that is not over."""

    id: str
    began_us: int
    tasks: tuple[TaskState, ...]


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Who runs the pipeline."""

    session: str
    host: str
    boot: str
    pid: int
    renewed_us: int
    lease_seconds: float = LEASE_SECONDS


class PipelineState(msgspec.Struct, frozen=True, kw_only=True):
    """The document. `done_us`: when the run began in which a step was last done on all of its places.

    `undone`: what became of the steps that were not done in their last run.
    """

    version: int = 1
    holder: Holder | None = None
    run: RunState | None = None
    done_us: dict[str, int] = {}
    undone: dict[str, Status] = {}


class PipelineBook:
    """The state and the reports of a pipeline, in stores that are open."""

    def __init__(self, name: str, metadata_root: str, objects: ObjectStore, metadata: MetadataStore) -> None:
        self._name = name
        self._objects = objects
        self._runs_prefix = pipeline_runs_prefix(name)
        self._document: VersionedDocument[PipelineState] = VersionedDocument(
            metadata,
            pipeline_key(name, metadata_root),
            encode_json,
            lambda data, key: decode_json(data, key, PipelineState),
            unanswered_attempts=3,
        )

    def read(self) -> PipelineState:
        found = self._document.read()
        return PipelineState() if found is None else found.value

    @contextmanager
    def held(self, clock: Clock, *, take_over: bool = False) -> Iterator[HeldBook]:
        """The right to run the pipeline, as long as the body takes; HeldError if somebody else runs it."""
        mine = HeldBook(self, self._document, clock)
        mine.take(take_over=take_over)
        try:
            with kept_alive(mine.renew):
                yield mine
        finally:
            with suppress(TidelogError):  # it runs out by itself
                mine.release()

    # Reports

    def put_report(self, run: str, name: str, report: object) -> str:
        """Keeps a report; returns its key."""
        key = f"{self._runs_prefix}{run}/{name}.json"
        self._objects.put(key, msgspec.json.format(msgspec.json.encode(report), indent=1))
        return key

    def report(self, run: str, name: str) -> dict[str, Any] | None:
        """A report that was kept; None where there is none."""
        found = self._objects.find(f"{self._runs_prefix}{run}/{name}.json")
        return None if found is None else msgspec.json.decode(found.data, type=dict[str, Any])

    def runs(self) -> list[str]:
        """The runs that have reports, oldest first."""
        keys = (one.key.removeprefix(self._runs_prefix) for one in self._objects.list(self._runs_prefix))
        return list(dict.fromkeys(key.partition("/")[0] for key in keys))

    def prune(self, kept: int, but: str) -> None:
        """Deletes the reports of all but the newest runs."""
        for run in [one for one in self.runs()[:-kept] if one != but]:
            prefix = f"{self._runs_prefix}{run}/"
            self._objects.delete([one.key for one in self._objects.list(prefix)])
            self._objects.remove_folder(prefix)


class HeldBook:
    """The state in the hands of the one that runs the pipeline."""

    def __init__(self, book: PipelineBook, document: VersionedDocument[PipelineState], clock: Clock) -> None:
        self.book = book
        self._document = document
        self._clock = clock
        self._session = secrets.token_hex(8)

    def take(self, *, take_over: bool) -> None:
        """Becomes the holder; HeldError names the one that there is."""

        def change(known: PipelineState | None) -> PipelineState:
            state = known or PipelineState()
            if state.holder is not None and not take_over and not is_over(state.holder, self._clock.now_us()):
                raise _held(state.holder, self._clock.now_us())
            return msgspec.structs.replace(state, holder=self._holder())

        self._document.update(change)

    def renew(self) -> None:
        """Says that it is still at work."""
        self._change(lambda state: msgspec.structs.replace(state, holder=self._holder()))

    def release(self) -> None:
        """Somebody else may run it now; of a holder that was taken over, nothing."""
        with suppress(LeaseLostError):
            self._change(lambda state: msgspec.structs.replace(state, holder=None))

    def begin(self, tasks: Callable[[PipelineState], tuple[TaskState, ...]]) -> RunState:
        """The run that is not over, or a new one with these tasks."""

        def change(state: PipelineState) -> PipelineState:
            if state.run is not None:
                return state
            now_us = self._clock.now_us()
            moment = datetime.fromtimestamp(now_us / _US, UTC)
            run = RunState(id=f"{moment:%Y%m%dT%H%M%S.%fZ}", began_us=now_us, tasks=tasks(state))
            return msgspec.structs.replace(state, run=run)

        run = self._change(change).run
        assert run is not None, "it was put there"
        return run

    def record(self, number: int, task: TaskState) -> RunState:

        def change(state: PipelineState) -> PipelineState:
            assert state.run is not None, "only its holder ends it"
            tasks = (*state.run.tasks[:number], task, *state.run.tasks[number + 1 :])
            return msgspec.structs.replace(state, run=msgspec.structs.replace(state.run, tasks=tasks))

        run = self._change(change).run
        assert run is not None
        return run

    def end(self, run: RunState) -> None:
        """The run is over: steps that were done on all of their places count from its begin."""
        undone: dict[str, Status] = {one.step: one.status for one in reversed(run.tasks) if one.status != "done"}
        taken = sorted({one.step for one in run.tasks})
        done_us = {name: run.began_us for name in taken if name not in undone}

        def change(state: PipelineState) -> PipelineState:
            known = {name: status for name, status in state.undone.items() if name not in taken}
            return msgspec.structs.replace(state, run=None, done_us=state.done_us | done_us, undone=known | undone)

        self._change(change)

    def _change(self, change: Callable[[PipelineState], PipelineState]) -> PipelineState:
        def checked(known: PipelineState | None) -> PipelineState:
            if known is None or known.holder is None or known.holder.session != self._session:
                holder = "nobody" if known is None or known.holder is None else f"{known.holder.host}"
                raise LeaseLostError(
                    f"this run was taken over: the pipeline is held by {holder} now",
                    operation="run the pipeline",
                    hint="Nothing is lost: the other run goes on where this one was",
                )
            return change(known)

        return self._document.update(checked)

    def _holder(self) -> Holder:
        return Holder(
            session=self._session,
            host=socket.gethostname(),
            boot=_process_space(),
            pid=os.getpid(),
            renewed_us=self._clock.now_us(),
        )


def is_over(holder: Holder, now_us: int) -> bool:
    """Whether it has lost the pipeline: no sign of life for its lease, or its process is gone."""
    if now_us - holder.renewed_us >= holder.lease_seconds * _US:
        return True
    is_here = (holder.host, holder.boot) == (socket.gethostname(), _process_space()) and bool(holder.boot)
    return is_here and holder.pid != os.getpid() and not Path(f"/proc/{holder.pid}").exists()


def _process_space() -> str:
    """Tells where an id of a process means what it means here: in this container, since the machine was started."""
    boot = boot_id()
    try:
        return boot and f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _held(holder: Holder, now_us: int) -> HeldError:
    age_seconds = max(0.0, (now_us - holder.renewed_us) / _US)
    hint = (
        f"Wait for it; {holder.lease_seconds:g} s after its last sign of life it may be taken, and --take-over "
        "takes it at once"
    )
    return HeldError(
        f"the pipeline is run on {holder.host} (pid {holder.pid}), last heard of {age_seconds:.0f} s ago",
        operation="run the pipeline",
        hint=Hint(hint, command=hint),
    )
