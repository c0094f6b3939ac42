"""A topic in a directory: append, read, follow, and what is durable when.

python examples/quickstart.py [DIRECTORY]
"""

from __future__ import annotations

import sys
import tempfile
import threading

import tidelog


def main(directory: str) -> None:
    """Runs against a log directory, which is made when absent."""
    with tidelog.open(directory) as log:
        orders = log.topic("shop/orders")

        # Accepted at once; on the disk within `fsync_interval_ms` at the latest.
        orders.append(b"two apples", key=b"customer-7", headers={"source": b"till"})

        # Returns once it is on the disk. Many threads that do this share one sync.
        offset = orders.append(b"one pear", key=b"customer-8", sync=True)
        print(f"offset {offset} is safe")

        # Somebody who tails the topic from its end.
        tail = orders.read("latest", stop=orders.next_offset + 3, follow=True)
        reader = threading.Thread(target=lambda: print("tailed", [m.value for m in tail]))
        reader.start()
        orders.append_many([b"a", b"b", tidelog.Message(b"c", key=b"customer-7")])
        orders.flush()
        reader.join()

    # Another process may read along while the owner writes; here the owner is gone.
    with tidelog.open(directory, read_only=True) as log:
        for message in log.topic("shop/orders").read(start="earliest"):
            print(message.offset, message.key, message.value, message.headers)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(scratch)
