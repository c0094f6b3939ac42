"""The example that mirrors topics from Kafka, between two servers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from tests.clients.conftest import Service

import tidelog

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "mirror_from_kafka.py"
_WAIT_SECONDS = 120.0


def load() -> Any:
    spec = importlib.util.spec_from_file_location("mirror_from_kafka", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def contents(service: Service) -> list[tuple[int, int, bytes | None, bytes | None, Any]]:
    """All messages of the topic, as the library has them."""
    assert service.stop() == 0
    with tidelog.open(service.directory, read_only=True) as log:
        return [
            (one.partition, to_ms(one), one.key, one.value, one.header_list)
            for one in sorted(log.topic("shop/orders").read(), key=lambda one: (one.partition, one.offset))
        ]


def to_ms(message: tidelog.Message) -> int:
    assert message.timestamp is not None
    return round(message.timestamp.timestamp() * 1000)


def test_mirror_goes_on_where_it_was_cut(
    serve: Callable[..., Service], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every message is there once, in its partition and in order, although one run dies between two transactions."""
    source, target = serve(directory=tmp_path / "old"), serve(directory=tmp_path / "new")
    admin = AdminClient({"bootstrap.servers": source.kafka})
    (created,) = admin.create_topics([NewTopic("shop.orders", 3, config={"retention.ms": "86400000"})]).values()
    created.result(_WAIT_SECONDS)
    producer = Producer({"bootstrap.servers": source.kafka})
    for number in range(90):
        value = None if number % 10 == 0 else b"%d" % number
        producer.produce("shop.orders", value, b"k%d" % (number % 7), number % 3, headers=[("n", b"1"), ("n", None)])
    assert producer.flush(_WAIT_SECONDS) == 0
    example = load()
    monkeypatch.setattr(example, "BATCH", 20)
    copy, copied = example.copy, []

    def dying(message: Message, to: Producer) -> None:
        copied.append(message)
        if len(copied) > 50:
            raise RuntimeError("killed")
        copy(message, to)

    monkeypatch.setattr(example, "copy", dying)
    with pytest.raises(RuntimeError):
        example.mirror(source.kafka, target.kafka, ["shop.orders"])
    monkeypatch.setattr(example, "copy", copy)
    rest = example.mirror(source.kafka, target.kafka, ["shop.orders"])
    assert 0 < rest < 90
    assert example.mirror(source.kafka, target.kafka, ["shop.orders"]) == 0
    wanted = contents(source)
    assert len(wanted) == 90
    assert contents(target) == wanted
    with tidelog.open(target.directory) as log:
        assert log.configure_topic("shop/orders")["retention_seconds"] == 86_400
