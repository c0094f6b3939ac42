"""Sizes and durations take units wherever they are accepted, and editors are shown every option."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import msgspec
import pytest

import tidelog
from tidelog.cold.settings import TierOptions, TierSettings
from tidelog.config.load import EngineConfig, OpenEngineOptions, OpenOptions, Settings, settings_of
from tidelog.engine.settings import EngineOptions, EngineSettings
from tidelog.errors import InputError
from tidelog.fields import aliases_of
from tidelog.log.settings import LogOptions, LogSettings
from tidelog.store.settings import StoreOptions, StoreSettings
from tidelog.topics.subscription.options import DeliveryOptions, SubscribeOptions
from tidelog.units import unit_of

NAME = "shop/orders"
PAIRS: list[tuple[type[msgspec.Struct], Any]] = [
    (LogSettings, LogOptions),
    (TierSettings, TierOptions),
    (StoreSettings, StoreOptions),
    (EngineSettings, EngineOptions),
    (DeliveryOptions, SubscribeOptions),
]


@pytest.mark.parametrize(("struct", "options"), PAIRS)
def test_editors_see_every_setting(struct: type[msgspec.Struct], options: Any) -> None:
    """The keywords are the fields, and those whose name ends in a unit take a text too."""
    hints = get_type_hints(options)
    named = {"kind"} if struct is DeliveryOptions else {"metadata"}  # arguments of `subscribe` and `open_engine`
    fields = set(struct.__struct_fields__) - named
    assert set(hints) == fields | set(aliases_of(struct))
    assert [name for name, hint in hints.items() if unit_of(name) and "str" not in str(hint)] == []


def test_opening_takes_all_settings() -> None:
    """Nothing that can be set is missing from the keywords of `open` and `open_engine`."""
    assert set(OpenOptions.__annotations__) == set(settings_of(Settings)) - {"dir", "store", "metadata"}
    tables = ("storage_engine", "object_store", "metadata_store")
    named = settings_of(EngineConfig).items()
    for_engines = {name for name, setting in named if setting.table in tables and name != "metadata"}
    assert set(OpenEngineOptions.__annotations__) == {*for_engines, "lease_seconds", "ownership_check_seconds"}
    for function in (tidelog.open, tidelog.open_engine, tidelog.Topic.subscribe, tidelog.LogDirectory.topic):
        assert "Unpack" in str(inspect.signature(function))


def test_units_are_accepted_where_numbers_are() -> None:
    """In settings of a directory, of a topic, of a subscription, and in timeouts."""
    with tidelog.open(None, fsync_interval_ms="1s", rotate_max_bytes="1MiB") as log:
        topic = log.topic(NAME, retention_seconds="365d", retention_bytes="64MiB")
        assert topic.append(b"value", timeout="5s") == 0
        with topic.subscribe("s", ack_timeout_seconds="1m", redelivery_backoff_seconds="100ms") as sub:
            message = sub.receive(timeout="1m")
            assert message is not None
            sub.nack(message, delay="1h")
            assert sub.receive(timeout="0s") is None
        assert log.configure_topic(NAME, retention_interval_seconds="1m")["retention_interval_seconds"] == 60


@pytest.mark.parametrize("wrong", ["soon", "5 kB", -1, True, [5]])
def test_what_is_no_duration_is_named(wrong: object) -> None:
    """The error names the argument and what it may be."""
    with tidelog.open(None) as log:
        topic = log.topic(NAME)
        with pytest.raises(InputError, match="timeout must be a number of seconds"):
            topic.append(b"value", timeout=wrong)  # type: ignore[arg-type]  # what somebody might try
        with pytest.raises(InputError, match=r"ack_timeout_seconds must be a number of seconds or text such as"):
            topic.subscribe("s", ack_timeout_seconds=wrong)  # type: ignore[arg-type]
        assert topic.next_offset == 0


def test_a_transaction_takes_a_unit(tmp_path: Any) -> None:
    """The engine follows the same rule."""
    with tidelog.open_engine(tmp_path / "engine", buffer_pool_bytes="8MiB", checkpoint_interval_seconds="1m") as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        with engine.transaction(timeout_seconds="5s") as transaction:
            assert transaction.list_objects("b") is not None
