"""Mirrors topics from a Kafka cluster to `tidelog serve`, exactly once, and goes on where it stopped.

    python mirror_from_kafka.py SOURCE:9092 TARGET:9092 orders payments     until the end of every partition is reached
    python mirror_from_kafka.py                                             shows it with two servers of its own

Messages keep their partition, key, headers, time and order. Each transaction on the target has some messages and the
offsets that they had at the source, committed for the group `mirror`: after a crash it begins behind the last of them.
Both directions are the same, so it also brings messages back.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType

GROUP = "mirror"
QUIET = {"log_level": 2}  # errors are raised here, and connections that end are no news
BATCH = 1000
COPIED_CONFIGS = ("cleanup.policy", "retention.ms", "retention.bytes", "max.message.bytes", "message.timestamp.type")


def create_missing(source: str, target: str, topics: list[str]) -> list[TopicPartition]:
    """Topics as they are at the source, with as many partitions; all of their partitions."""
    admins = [AdminClient({**QUIET, "bootstrap.servers": address}) for address in (source, target)]
    known, there = (admin.list_topics(timeout=30).topics for admin in admins)
    partitions = []
    for name in topics:
        count = len(known[name].partitions)
        partitions += [TopicPartition(name, number) for number in range(count)]
        if name not in there:
            (found,) = admins[0].describe_configs([ConfigResource(ResourceType.TOPIC, name)]).values()
            configs = {key: one.value for key, one in found.result().items() if key in COPIED_CONFIGS}
            (created,) = admins[1].create_topics([NewTopic(name, count, config=configs)]).values()
            created.result()
    return partitions


def mirror(source: str, target: str, topics: list[str]) -> int:
    """Copies what is new at the source, up to the end of each partition; returns how many messages."""
    partitions = create_missing(source, target, topics)
    reached = Consumer({**QUIET, "bootstrap.servers": target, "group.id": GROUP, "enable.auto.commit": False})
    begins = [
        TopicPartition(one.topic, one.partition, one.offset if one.offset >= 0 else OFFSET_BEGINNING)
        for one in reached.committed(partitions, timeout=30)
    ]
    reached.close()
    consumer = Consumer(
        {
            **QUIET,
            "bootstrap.servers": source,
            "group.id": GROUP,
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    consumer.assign(begins)
    # Without the last one librdkafka can wait for ever after its only broker was away (confluentinc/librdkafka#5511).
    settings = {"bootstrap.servers": target, "transactional.id": GROUP, "metadata.recovery.strategy": "none"}
    producer = Producer({**QUIET, **settings})
    producer.init_transactions()  # what another mirror has begun and not committed is aborted
    copied, silent, at_end = 0, 0, set[tuple[str | None, int | None]]()
    while len(at_end) < len(partitions):
        events = consumer.consume(BATCH, 0.5)
        silent = 0 if events else silent + 1
        if silent == 120:
            raise TimeoutError(f"{source} has sent nothing for a minute")
        for one in events:  # the end of a partition comes after its messages, and again after later ones
            (at_end.add if is_end(one) else at_end.discard)((one.topic(), one.partition()))
        messages = [one for one in events if not is_end(one)]
        if messages:
            producer.begin_transaction()
            for message in messages:
                copy(message, producer)
            producer.send_offsets_to_transaction(consumer.position(partitions), consumer.consumer_group_metadata())
            producer.commit_transaction()
            copied += len(messages)
    consumer.close()
    return copied


def is_end(event: Message) -> bool:
    """Whether it says that there is nothing more in its partition for now."""
    error = event.error()
    return error is not None and error.code() == KafkaError._PARTITION_EOF


def copy(message: Message, producer: Producer) -> None:
    """To the same partition of the same topic."""
    if message.error():
        raise KafkaException(message.error())
    producer.produce(
        message.topic(),
        message.value(),
        message.key(),
        message.partition(),
        headers=message.headers(),
        timestamp=message.timestamp()[1],
    )


# Without arguments: two servers, one in the place of Kafka.


class Server:
    """`tidelog serve` on a directory, while the block runs."""

    def __init__(self, directory: Path) -> None:
        command = [sys.executable, "-m", "tidelog.cli.main", "serve", "--dir", str(directory)]
        command += ["--kafka", "127.0.0.1:0", "--http", "127.0.0.1:0"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> str:
        """Its address, which is the first line that it prints."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().split()[1]

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()


def show() -> None:
    """Fills the first server twice, and mirrors what is new to the second."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(Path(folder, "old")) as source,
        Server(Path(folder, "new")) as target,
    ):
        producer = Producer({**QUIET, "bootstrap.servers": source})
        for round_number in range(2):
            for number in range(500):
                producer.produce("orders", f"order {round_number}-{number}", key=str(number))
            producer.flush()
            print("mirrored", mirror(source, target, ["orders"]), "messages")


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", metavar="SOURCE:PORT", help="where to read")
    parser.add_argument("target", nargs="?", metavar="TARGET:PORT", help="where to write")
    parser.add_argument("topics", nargs="*", metavar="TOPIC", help="which topics")
    arguments = parser.parse_args()
    if arguments.source is None:
        show()
    elif arguments.topics:
        print("mirrored", mirror(arguments.source, arguments.target, arguments.topics), "messages")
    else:
        parser.error("name the source, the target and at least one topic")


if __name__ == "__main__":
    main()
