"""The process that the demo kills: it appends synced messages and tells each one only after it was acknowledged.

A line on stdout is `offset value`, written in one piece, so whoever reads it knows what has to survive the kill.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from threading import Thread

from tidelog.topics.storage import LogDirectory
from tidelog.topics.topic import Topic

_THREADS = 8


def append_until_killed(topic: Topic, worker: int) -> None:
    """Ends otherwise only when nobody listens any more."""
    number = 0
    while True:
        value = b"worker-%d-message-%d" % (worker, number)
        offset = topic.append(value, key=b"worker-%d" % worker, sync=True)
        try:
            os.write(sys.stdout.fileno(), b"%d %s\n" % (offset, value))
        except BrokenPipeError:
            return
        number += 1


def main() -> None:
    """Takes the log directory and the topic from the command line."""
    root, name = sys.argv[1:]
    with LogDirectory(Path(root)) as log:
        topic = log.topic(name)
        threads = [Thread(target=append_until_killed, args=(topic, worker)) for worker in range(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
