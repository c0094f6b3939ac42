"""Dead letters: a message that nobody can handle is set aside, inspected, and replayed once the cause is fixed.

python examples/dead_letters.py [DIRECTORY]

From the shell: tidelog dlq list, and tidelog dlq replay TOPIC.
"""

from __future__ import annotations

import sys
import tempfile

import tidelog

ORDERS = [b"12", b"7", b"seven", b"30"]


def add_up(orders: tidelog.Topic, numbers: dict[bytes, int]) -> int:
    """Adds up what it understands; what fails three times is given up, and does not hold the others up."""
    total = 0
    with orders.subscribe("sum", "shared", max_deliveries=3, redelivery_backoff_seconds=0.01) as sub:
        while (message := sub.receive(timeout=0.5)) is not None:
            try:
                total += numbers[message.value] if message.value in numbers else int(message.value)
            except ValueError:
                sub.nack(message)
            else:
                sub.ack(message)
    return total


def main(directory: str) -> None:
    """Runs against a log directory, which is made when absent."""
    with tidelog.open(directory) as log:
        orders = log.topic("shop/orders")
        orders.append_many(ORDERS)
        print("the others add up to", add_up(orders, {}))

        # It is durable among the dead letters before it counts as done, so no crash loses it between the two.
        dead = log.topic("shop/orders.sum.dlq")
        for letter in dead.read():
            origin = {name.removeprefix("tidelog-origin-"): value.decode() for name, value in letter.headers.items()}
            print("given up:", letter.value, origin)

        # The program was mended, and the letter goes back. Its offset as sequence: however often this runs, once.
        for _ in range(2):
            with orders.producer("back from shop/orders.sum.dlq") as producer:
                for letter in dead.read():
                    producer.append(letter.value, key=letter.key, sequence=letter.offset, sync=True)
        assert orders.next_offset == len(ORDERS) + 1
        print("sent back and understood:", add_up(orders, {b"seven": 7}))
        assert dead.next_offset == 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(scratch)
