"""What Kafka's clients stored, read by everybody else: the library, subscriptions and the inspection of files."""

from __future__ import annotations

from pathlib import Path

from tests.oracles.record_batches import Record, batch_bytes, put_record

import tidelog
from tidelog.cli.inspect import _describe_envelope
from tidelog.service.kafka.records import Control, control_payload, decode_produced

COMMIT = control_payload(Control(True, 7, 0, 1, 1_700_000_000_000_000))
ABORT = control_payload(Control(False, 7, 0, 1, 1_700_000_000_000_000))


def stored_payloads() -> list[bytes]:
    """A transaction of two messages, one of them a tombstone, and its end."""
    records = [Record(0, 0, b"k", b"one", [(b"h", b"1"), (b"h", None)]), Record(0, 1, b"k", None, [])]
    batch = batch_bytes(0, 1, 0, 0x10, (7, 0, 0), 1_700_000_000_000, 0, [put_record(one) for one in records])
    return [*decode_produced(batch).frames.payloads(), COMMIT]


def test_the_library_reads_messages_and_passes_over_the_ends_of_transactions(tmp_path: Path) -> None:
    """From memory, from files, and through a subscription; offsets stay what they are."""
    with tidelog.open(tmp_path) as log:
        topic = log.topic("shop/orders")
        for payload in stored_payloads():
            topic._log.append(payload)
        topic.append(b"after")
        expected = [(0, b"one"), (1, None), (3, b"after")]
        assert [(one.offset, one.value) for one in topic.read(start=0)] == expected
        assert next(iter(topic.read(start=0))).header_list == (("h", b"1"), ("h", None))
        subscription = topic.subscribe("billing", start="earliest")
        received = [subscription.receive(timeout=60) for _ in expected]
        assert [(one.offset, one.value) for one in received if one is not None] == expected
    with tidelog.open(tmp_path) as log:
        assert [(one.offset, one.value) for one in log.topic("shop/orders").read(start=0)] == expected


def test_the_inspection_of_files_names_the_ends_of_transactions() -> None:
    """As what they are, not as damage."""
    assert _describe_envelope(3, COMMIT) == {"message": "control record: a transaction was committed"}
    assert _describe_envelope(3, ABORT) == {"message": "control record: a transaction was aborted"}
