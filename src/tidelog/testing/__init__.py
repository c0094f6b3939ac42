"""The test kit: for tidelog's own tests, and for applications built on its log.

A crash test in three steps. A workload uses the product on a disk that can die, and records what it was promised:

    def workload(files: FaultyFiles, history: History) -> None:
        log = Log.open(Path("/log"), LogSettings(), files=files)
        try:
            for number in range(20):
                history.attempted("main", b"%d" % number)
                offset = log.append(b"%d" % number, sync=True)
                history.accepted("main", offset, b"%d" % number)
                history.synced(offset)
        finally:
            log.close()

A check opens what the crash left and verifies the promises:

    def check(files: FaultyFiles, history: History) -> None:
        log = Log.open(Path("/log"), LogSettings(), files=files)
        history.reopened(log.next_offset)
        for batch in log.read():
            for offset, value in enumerate(batch.payloads(), batch.first_offset):
                history.read("after", offset, value)
        log.close()
        assert_history(history)

The driver kills the workload at every write, sync, rename, ... in turn:

    crash_everywhere(workload, check)

When a promise is broken, the error names a command that replays that one crash. `CrashPlan` says how thoroughly to
look, `crash_machine_everywhere` takes anything that crashes in place of an empty disk.

`cut_world_everywhere` does the same to a `World`: disks of several nodes, an object store and a metadata store under
one numbering of calls. `FaultyStore` and `FaultyMetadata` are those stores; they fail, lose answers and do things late
on demand, and count what is asked of them.

Without the driver: `FaultyFiles(crash_at=7)` dies at its seventh change, `after_crash("lose")` is what a machine finds
after the power failed there, `fail("sync", error=errno.EIO)` and `capacity_bytes` break a disk that lives on.
`ManualClock` is a clock that a test moves by hand.
"""

from tidelog.clock import ManualClock
from tidelog.testing.crash import (
    BrokenPromiseError,
    CrashPlan,
    CrashPoint,
    CrashSummary,
    Machine,
    World,
    crash_everywhere,
    crash_machine_everywhere,
    cut_world_everywhere,
)
from tidelog.testing.faults import STORE_FAULTS, Call, Crash, Faults, StoreFault
from tidelog.testing.faulty_files import FaultyFiles
from tidelog.testing.faulty_store import FaultyMetadata, FaultyStore
from tidelog.testing.history import History, Violation, assert_history, check_history
from tidelog.testing.remote import Traffic
from tidelog.testing.survival import POLICIES, Policy

__all__ = [
    "POLICIES",
    "STORE_FAULTS",
    "BrokenPromiseError",
    "Call",
    "Crash",
    "CrashPlan",
    "CrashPoint",
    "CrashSummary",
    "Faults",
    "FaultyFiles",
    "FaultyMetadata",
    "FaultyStore",
    "History",
    "Machine",
    "ManualClock",
    "Policy",
    "StoreFault",
    "Traffic",
    "Violation",
    "World",
    "assert_history",
    "check_history",
    "crash_everywhere",
    "crash_machine_everywhere",
    "cut_world_everywhere",
]
