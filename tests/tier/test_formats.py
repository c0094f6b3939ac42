"""The formats page is held to the code: keys, object names and stamped entries."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tidelog.tier.descriptor import Descriptor, decode_descriptor, encode_descriptor
from tidelog.tier.keys import ObjectId, TopicKeys, consignment_name, node_key
from tidelog.tier.metadata import stamp

FORMATS = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text("utf-8")


def block(kind: str) -> str:
    """The one fenced block of this kind."""
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```$", FORMATS, re.MULTILINE | re.DOTALL)
    return str(found)


def first_words(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines()]


def test_the_keys_are_those_of_the_formats_page() -> None:
    """Whoever looks for them in a store finds them where the page says."""
    topic = TopicKeys("shop", "orders")
    assert first_words(block("text keys")) == [
        topic.descriptor(42),
        topic.current,
        topic.state,
        topic.owner,
        topic.start,
        topic.settings,
        topic.producers,
        topic.subscription("billing"),
        topic.replacement_state,
        topic.replacement(3, 42),
        topic.intake,
        topic.replay("from-eu"),
        topic.epoch_floor,
        node_key("web-1-5f0c2a9e", "9d2f6b1c04e7a853"),
    ]
    assert first_words(block("text objects")) == [
        topic.object(ObjectId(42, 99, 7)),
        topic.object(ObjectId(42, 99, 7, 3)),
        topic.staged_part(consignment_name("nightly", 7), 3, "f00d"),
        topic.manifest(consignment_name("nightly", 7), "c0ffee"),
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
