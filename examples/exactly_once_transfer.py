"""Exactly once from one topic to another, by a worker that is killed again and again.

python examples/exactly_once_transfer.py [DIRECTORY]    fills a topic, kills workers, and counts
python examples/exactly_once_transfer.py work DIRECTORY the worker

A subscription brings every message at least once. A producer stores a sequence at most once. The sequence is the offset
that the message had: together that is exactly once.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

import tidelog

MESSAGES = 3000
BATCH = 20
KILLS = 3


def transfer(directory: str) -> None:
    """Moves what is in `bank/in` to `bank/out`, in order, as long as there is something."""
    came_again = 0
    with tidelog.open(directory) as log:
        target = log.topic("bank/out")
        # Exclusive, and nothing is given back: sequences have to grow, and one that comes late counts as stored.
        with log.topic("bank/in").subscribe("transfer") as source, target.producer("transfer") as producer:
            stored = producer.last_sequence
            while messages := source.receive_many(BATCH, timeout=0):
                for message in messages:
                    came_again += stored is not None and message.offset <= stored
                    producer.append(message.value.upper(), key=message.key, sequence=message.offset)
                target.flush()  # on the disk first, then acknowledged: between the two a crash repeats, and never loses
                source.ack_many(messages)
                print(f"up to {messages[-1].offset}", flush=True)
    print(f"{came_again} came again and were not stored twice")


def start_worker(directory: str) -> subprocess.Popen[str]:
    """A process of its own, so that it can be killed."""
    command = [sys.executable, __file__, "work", directory]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def main(directory: str) -> None:
    """Runs against a log directory, which is made when absent."""
    with tidelog.open(directory) as log:
        log.topic("bank/in").append_many([b"payment %d" % number for number in range(MESSAGES)], sync=True)

    for attempt in range(1, KILLS + 1):
        with start_worker(directory) as worker:
            assert worker.stdout is not None
            last = [worker.stdout.readline() for _ in range(10 * attempt)][-1]
            worker.kill()  # as kill -9: it stores nothing any more
        print(f"killed a worker that had come {last.strip()}")

    with start_worker(directory) as worker:
        output, problems = worker.communicate()
    assert worker.returncode == 0, problems
    print("the last one finished;", output.splitlines()[-1])

    with tidelog.open(directory, read_only=True) as log:
        values = [message.value for message in log.topic("bank/out").read()]
    assert values == [b"PAYMENT %d" % number for number in range(MESSAGES)]
    print(f"{len(values)} messages are there, in order, each once")


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        transfer(sys.argv[2])
    elif len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(scratch)
