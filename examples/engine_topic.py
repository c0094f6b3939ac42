"""A topic as the log of an engine: accounts that are read at any moment of the past, and rebuilt from the topic alone.

python examples/engine_topic.py [DIRECTORY]
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import tidelog
from tidelog.engine.orchestrator.base import drive
from tidelog.engine.orchestrator.topic import TopicOrchestrator
from tidelog.engine.txn.transaction import Transaction


def balance(reader: tidelog.Engine | Transaction, name: str) -> int:
    """The balance of an account, read from the engine or a transaction."""
    return int(reader.read("accounts", name).data)


def transfer(engine: tidelog.Engine, log: TopicOrchestrator, source: str, target: str, amount: int) -> int:
    """Moves money; the seq of the entry that did. If somebody else was faster it is all done again."""
    while True:
        try:
            with engine.transaction() as tx:
                tx.put("accounts", source, b"%d" % (balance(tx, source) - amount))
                tx.put("accounts", target, b"%d" % (balance(tx, target) + amount))
                seq = log.append(tx.guarded())  # on the topic's disk: decided
                drive(engine, log)
            if engine.read("accounts", source).seq == seq:
                return seq
        except (tidelog.ConflictError, tidelog.RetryError):
            continue


def main(directory: Path) -> None:
    """Runs against a directory, which is made when absent."""
    with tidelog.open(directory / "log") as log:
        entries = TopicOrchestrator(log.topic("bank/entries"))
        with tidelog.open_engine(directory / "engine") as engine:
            entries.append(tidelog.CreateBucket("accounts"))
            opened = [tidelog.PutObject("accounts", "ann", b"100"), tidelog.PutObject("accounts", "bob", b"20")]
            entries.append(tidelog.Batch(opened))  # both or none
            drive(engine, entries)
            before = engine.applied_seq
            transfer(engine, entries, "ann", "bob", 30)
            print("now:", {name: balance(engine, name) for name in ("ann", "bob")})
            print("before:", {name: int(engine.read("accounts", name, before).data) for name in ("ann", "bob")})
            digest = engine.digest()

        # The engine is a view of its log. Without a store, too, nothing is lost with it as long as the topic is there.
        shutil.rmtree(directory / "engine")
        with tidelog.open_engine(directory / "engine") as engine:
            drive(engine, entries)
            assert engine.digest() == digest
            print(f"rebuilt from the topic up to seq {engine.applied_seq}: the same digest")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
