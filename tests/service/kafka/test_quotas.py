"""Quotas by client id: who has to wait for how long, what is stored, and what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tidelog.service.kafka.codec import wire
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.quotas import FETCH_RATE, PRODUCE_RATE, ClientQuotas
from tidelog.service.kafka.requests import RequestContext
from tidelog.store.metadata.memory import MemoryMetadataStore

CONTEXT = RequestContext(49, 1, "admin", "127.0.0.1")
DESCRIBE, ALTER = wire(48), wire(49)


class Time:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def entity(kind: str, name: str | None) -> Any:
    return ALTER.AlterClientQuotasRequestEntityData(kind, name)


def altered(quotas: ClientQuotas, entities: list[Any], *, validate_only: bool = False, **rates: float | None) -> Any:
    """Sets quotas, or removes those that are None; the answer."""
    ops = [ALTER.AlterClientQuotasRequestOpData(key, rate or 0.0, rate is None) for key, rate in rates.items()]
    entry = ALTER.AlterClientQuotasRequestEntryData(entities, ops)
    request = ALTER.AlterClientQuotasRequest(entries=[entry], validate_only=validate_only)
    (answer,) = asyncio.run(quotas.alter(CONTEXT, request)).entries
    return answer


def described(quotas: ClientQuotas, *components: tuple[str, int, str | None], strict: bool = False) -> dict[Any, Any]:
    request = DESCRIBE.DescribeClientQuotasRequest(
        components=[DESCRIBE.DescribeClientQuotasRequestComponentData(*one) for one in components], strict=strict
    )
    response = asyncio.run(quotas.describe(CONTEXT, request))
    return {one.entity[0].entity_name: {value.key: value.value for value in one.values} for one in response.entries}


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def store() -> MemoryMetadataStore:
    return MemoryMetadataStore()


@pytest.fixture
def quotas(store: MemoryMetadataStore, time: Time) -> ClientQuotas:
    return ClientQuotas(store, now=time)


def test_client_waits_until_its_rate_is_the_quota(quotas: ClientQuotas, time: Time) -> None:
    """A second's worth at once is free; after that every byte costs its time."""
    assert altered(quotas, [entity("client-id", "till")], producer_byte_rate=1000.0).error_code == ErrorCode.NONE
    assert quotas.used(PRODUCE_RATE, "till", 1000) == 0
    assert quotas.used(PRODUCE_RATE, "till", 500) == pytest.approx(0.5)
    time.seconds += 0.25
    assert quotas.used(PRODUCE_RATE, "till", 250) == pytest.approx(0.5)
    assert quotas.used(PRODUCE_RATE, "till", 1_000_000) == 10  # the rest waits with the next request
    assert quotas.used(PRODUCE_RATE, "till", 0) == 10
    time.seconds += 3600
    assert quotas.used(PRODUCE_RATE, "till", 1000) == 0
    assert quotas.used(FETCH_RATE, "till", 1 << 30) == 0
    assert quotas.used(PRODUCE_RATE, "other", 1 << 30) == 0


def test_default_is_for_each_client_that_has_none(quotas: ClientQuotas) -> None:
    """They do not share it; a client without a name has it too."""
    altered(quotas, [entity("client-id", None)], consumer_byte_rate=100.0)
    altered(quotas, [entity("client-id", "big")], consumer_byte_rate=100_000.0)
    assert quotas.used(FETCH_RATE, "a", 200) == pytest.approx(1)
    assert quotas.used(FETCH_RATE, "b", 100) == 0
    assert quotas.used(FETCH_RATE, None, 200) == pytest.approx(1)
    assert quotas.used(FETCH_RATE, "big", 100_000) == 0


def test_quotas_are_stored_and_described(quotas: ClientQuotas, store: MemoryMetadataStore, time: Time) -> None:
    """Another process finds them; removed ones are gone; a validation stores nothing."""
    altered(quotas, [entity("client-id", "a")], producer_byte_rate=1.0, consumer_byte_rate=2.0)
    altered(quotas, [entity("client-id", None)], producer_byte_rate=3.0)
    altered(quotas, [entity("client-id", "b")], validate_only=True, producer_byte_rate=9.0)
    altered(quotas, [entity("client-id", "a")], producer_byte_rate=None)
    again = ClientQuotas(store, now=time)
    asyncio.run(again.start())
    assert again.is_needed
    everything = {"a": {FETCH_RATE: 2.0}, None: {PRODUCE_RATE: 3.0}}
    assert described(again) == described(again, ("client-id", 2, None), strict=True) == everything
    assert described(again, ("client-id", 0, "a")) == {"a": {FETCH_RATE: 2.0}}
    assert described(again, ("client-id", 1, None)) == {None: {PRODUCE_RATE: 3.0}}
    assert described(again, ("user", 2, None)) == described(again, strict=True) == {}
    altered(quotas, [entity("client-id", "a")], consumer_byte_rate=None)
    altered(quotas, [entity("client-id", None)], producer_byte_rate=None)
    assert not quotas.is_needed


@pytest.mark.parametrize(
    ("entities", "rates", "words"),
    [
        ([entity("user", "anna")], {PRODUCE_RATE: 1.0}, "by client-id alone"),
        ([entity("user", "anna"), entity("client-id", "a")], {PRODUCE_RATE: 1.0}, "by user, client-id"),
        ([], {PRODUCE_RATE: 1.0}, "by nothing"),
        ([entity("client-id", "a")], {"request_percentage": 50.0}, "no quota request_percentage here"),
        ([entity("client-id", "a")], {PRODUCE_RATE: -1.0}, "above 0"),
        ([entity("client-id", "a")], {PRODUCE_RATE: float("nan")}, "above 0"),
    ],
)
def test_what_cannot_be_a_quota_is_refused(
    quotas: ClientQuotas, entities: list[Any], rates: dict[str, Any], words: str
) -> None:
    """With words, and nothing is stored."""
    answer = altered(quotas, entities, **rates)
    assert answer.error_code == ErrorCode.INVALID_REQUEST
    assert words in answer.error_message
    assert not quotas.is_needed
