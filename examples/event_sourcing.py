"""Event sourcing: accounts are what their events add up to, now, at any earlier moment, and after a change of mind.

python examples/event_sourcing.py [DIRECTORY]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable

import tidelog

Balances = dict[str, int]


def event(account: str, kind: str, cents: int) -> tidelog.Message:
    """What happened, in words that will still be understood when the program is another one."""
    return tidelog.Message(json.dumps({"kind": kind, "cents": cents}).encode(), key=account.encode())


def replay(events: Iterable[tidelog.Message], balances: Balances | None = None) -> Balances:
    """The state that follows from events, on top of what followed from those before."""
    state: defaultdict[str, int] = defaultdict(int, balances or {})
    for message in events:
        happened = json.loads(message.value)
        sign = 1 if happened["kind"] == "deposited" else -1
        state[(message.key or b"").decode()] += sign * happened["cents"]
    return dict(state)


def main(directory: str) -> None:
    """Runs against a log directory, which is made when absent."""
    with tidelog.open(directory) as log:
        accounts = log.topic("bank/accounts")
        accounts.append_many([event("ann", "deposited", 100_00), event("bob", "deposited", 20_00)], sync=True)
        # Both or none, whatever happens: that is what append_many promises.
        transfer = [event("ann", "withdrew", 30_00), event("bob", "deposited", 30_00)]
        before, _ = accounts.append_many(transfer, sync=True)
        print("now:", replay(accounts.read()))
        print("before the transfer:", replay(accounts.read(stop=before)))
        snapshot, as_of = replay(accounts.read()), accounts.next_offset

    # The process is gone, and with it every balance. The events are not.
    with tidelog.open(directory) as log:
        accounts = log.topic("bank/accounts")
        accounts.append(event("bob", "withdrew", 5_00), sync=True)
        rebuilt = replay(accounts.read(start="earliest"))
        assert rebuilt == replay(accounts.read(start=as_of), snapshot) == {"ann": 70_00, "bob": 45_00}
        print("after a restart, from the first event and from the snapshot alike:", rebuilt)

        # A question that nobody had when the events were written: a new subscription begins at the first of them.
        moved: defaultdict[str, int] = defaultdict(int)
        with accounts.subscribe("turnover", start="earliest") as turnover:
            while message := turnover.receive(timeout=0):
                moved[(message.key or b"").decode()] += json.loads(message.value)["cents"]
                turnover.ack(message)
            first = dict(moved)
            turnover.seek("earliest")  # the answer was wrong? Ask again
            again = turnover.receive_many(100, timeout=1)
            assert len(again) == accounts.next_offset
        print("turnover, a question of today about all of the past:", first)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(scratch)
