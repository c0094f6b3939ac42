"""The formats page is held to the code: keys, object names and stamped entries."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tidelog.cold.catalog import Descriptor, decode_descriptor, encode_descriptor
from tidelog.store.keys import (
    STORE_ID,
    FlushKey,
    ObjectId,
    TopicKeys,
    accounts_key,
    flush_key,
    flush_object,
    group_cursor,
    group_key,
    kafka_group_configs_key,
    kafka_quotas_key,
    node_key,
    pipeline_key,
    producer_ids_key,
    staged_commit_name,
    store_key,
    transaction_key,
)
from tidelog.store.metadata import base as stamp

FLUSH = FlushKey("web-1-5f0c2a9e", "9d2f6b1c04e7a853", 0, 17)
FORMATS = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text("utf-8")


def block(kind: str) -> str:
    """The one fenced block of this kind."""
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```$", FORMATS, re.MULTILINE | re.DOTALL)
    return str(found)


def first_words(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines()]


def test_the_keys_are_those_of_the_formats_page() -> None:
    """Every key is where the page says."""
    topic = TopicKeys("shop", "orders")
    assert first_words(block("text keys")) == [
        topic.descriptor(42),
        topic.current,
        topic.state,
        topic.owner,
        topic.start,
        topic.settings,
        topic.partitions,
        topic.producers,
        topic.kafka_producers,
        topic.subscription("billing"),
        topic.subscription(group_cursor("readers")),
        topic.rewrite_state,
        topic.replacement(3, 42),
        topic.staging,
        topic.writes,
        topic.replay("from-eu"),
        topic.epoch_floor,
        store_key(),
        node_key("web-1-5f0c2a9e", "9d2f6b1c04e7a853"),
        flush_key(FLUSH),
        group_key("readers", "5e0c..."),
        transaction_key("billing-1"),
        producer_ids_key(),
        pipeline_key("nightly"),
        kafka_quotas_key(),
        accounts_key(),
        kafka_group_configs_key(),
    ]
    assert first_words(block("text objects")) == [
        STORE_ID,
        flush_object(FLUSH, "c0ffee"),
        topic.object(ObjectId(42, 99, 7)),
        topic.object(ObjectId(42, 99, 7, 3)),
        topic.staged_part(staged_commit_name("nightly", 7), 3, "f00d"),
        topic.manifest(staged_commit_name("nightly", 7), "c0ffee"),
    ]


def test_a_descriptor_is_that_of_the_formats_page() -> None:
    """What the page shows is read, and written again as the same document."""
    shown = block("json descriptor").encode("utf-8")
    descriptor = decode_descriptor(shown, "key", 42)
    assert isinstance(descriptor, Descriptor)
    assert json.loads(encode_descriptor(descriptor)) == json.loads(shown)


def test_a_stamped_entry_is_that_of_the_formats_page() -> None:
    """To the letter."""
    assert stamp.encode("000102030405060708090a0b0c0d0e0f", b"hello") == block("text entry")[:-1].encode()
