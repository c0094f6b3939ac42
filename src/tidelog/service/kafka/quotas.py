"""Quotas: how many bytes a second a client id may produce and consume.

    {root}/storage/kafka-quotas    `QuotaDocument`, as JSON in the metadata store of the installation

Invariants
- A client id has its own quota, else the default one, else none. All connections of a client id share it.
- Nothing is refused or lost: a client beyond its quota is answered as always, gets the time to wait
  (`throttle_time_ms`), and its connection is not read from for as long (KIP-219).
- Measured over time, the rate is the quota: what one request has too much, the next ones wait for. A client that was
  silent may use what a second allows at once.
- A change is durable before it is answered, and counts from then on.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec

from tidelog.errors import TidelogError
from tidelog.service.kafka.broker import error_code
from tidelog.service.kafka.codec import wire
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.requests import Handler, RequestContext
from tidelog.store.document import VersionedDocument, decode_json, encode_json
from tidelog.store.keys import DEFAULT_ROOT, kafka_quotas_key
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.scheduler import in_store_thread

_DESCRIBE_CLIENT_QUOTAS, _ALTER_CLIENT_QUOTAS = 48, 49
PRODUCE_RATE, FETCH_RATE = "producer_byte_rate", "consumer_byte_rate"
_CLIENT_ID = "client-id"
_ENTITIES = ("user", _CLIENT_ID, "ip")
_EXACT, _DEFAULT, _ANY = range(3)
_BURST_SECONDS = 1.0
_LONGEST_SECONDS = 10.0
"""Longer than this no answer makes a client wait; what is left waits with the next request."""
_MAX_BUCKETS = 10_000

Rates = dict[str, float]


class QuotaDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The quotas of all client ids, and that of those that have none."""

    clients: dict[str, Rates] = {}
    default: Rates = {}

    def of(self, client_id: str | None) -> Rates:
        """Those of one client id; None is the default."""
        return self.default if client_id is None else self.clients.get(client_id, {})

    def with_rates(self, client_id: str | None, rates: Rates) -> QuotaDocument:
        """The same with other quotas of one client id; none at all removes it."""
        if client_id is None:
            return msgspec.structs.replace(self, default=rates)
        others = {name: known for name, known in self.clients.items() if name != client_id}
        return msgspec.structs.replace(self, clients={**others, client_id: rates} if rates else others)


class ClientQuotas:
    """The quotas of one installation, and how far its clients are beyond them."""

    def __init__(
        self, metadata: MetadataStore, root: str = DEFAULT_ROOT, now: Callable[[], float] | None = None
    ) -> None:
        """`now` is a monotonic time in seconds; the event loop's, unless a test has its own."""
        decode = partial(decode_json, kind=QuotaDocument)
        self._stored = VersionedDocument(metadata, kafka_quotas_key(root), encode_json, decode)
        self._known = QuotaDocument()
        self._now = now or asyncio.get_running_loop().time
        self._even_at: dict[tuple[str, str], float] = {}
        """When a client id will have waited enough for all that it has sent or got."""

    def handlers(self) -> dict[int, Handler]:
        return {_DESCRIBE_CLIENT_QUOTAS: self.describe, _ALTER_CLIENT_QUOTAS: self.alter}

    async def start(self) -> None:
        """Learns which quotas there are."""
        found = await in_store_thread(self._stored.read)
        self._known = QuotaDocument() if found is None else found.value

    # Throttling

    @property
    def is_needed(self) -> bool:
        """Whether anybody has a quota."""
        return bool(self._known.clients or self._known.default)

    def used(self, key: str, client_id: str | None, size: int) -> float:
        """Counts so many bytes of a client; returns the seconds that it has to wait."""
        name = client_id or ""
        rate = self._known.of(name).get(key) or self._known.default.get(key)
        if rate is None:
            return 0.0
        now = self._now()
        even_at = max(self._even_at.get((name, key), 0.0), now - _BURST_SECONDS) + size / rate
        if len(self._even_at) >= _MAX_BUCKETS and (name, key) not in self._even_at:
            self._even_at = {who: at for who, at in self._even_at.items() if at > now - _BURST_SECONDS}
        self._even_at[name, key] = even_at
        return min(max(0.0, even_at - now), _LONGEST_SECONDS)

    # Requests

    async def describe(self, context: RequestContext, request: Any) -> Any:
        module, known = wire(_DESCRIBE_CLIENT_QUOTAS), self._known
        unknown = next((one.entity_type for one in request.components if one.entity_type not in _ENTITIES), None)
        if unknown is not None:
            text = f"Unsupported entity type {unknown}"
            return module.DescribeClientQuotasResponse(
                error_code=ErrorCode.UNSUPPORTED_VERSION, error_message=text, entries=None
            )
        quotas: list[tuple[str | None, Rates]] = [*sorted(known.clients.items()), (None, known.default)]
        entries = [
            module.DescribeClientQuotasResponseEntryData(
                entity=[module.DescribeClientQuotasResponseEntityData(_CLIENT_ID, name)],
                values=[
                    module.DescribeClientQuotasResponseValueData(key, value) for key, value in sorted(rates.items())
                ],
            )
            for name, rates in quotas
            if rates and _is_asked_for(name, request)
        ]
        return module.DescribeClientQuotasResponse(error_message=None, entries=entries)

    async def alter(self, context: RequestContext, request: Any) -> Any:
        module = wire(_ALTER_CLIENT_QUOTAS)
        answers = []
        for entry in request.entries:
            code, words = await self._altered(entry, request.validate_only)
            entity = [
                module.AlterClientQuotasResponseEntityData(one.entity_type, one.entity_name) for one in entry.entity
            ]
            answers.append(module.AlterClientQuotasResponseEntryData(code, words, entity))
        return module.AlterClientQuotasResponse(entries=answers)

    async def _altered(self, entry: Any, validate_only: bool) -> tuple[ErrorCode, str | None]:
        problem = _problem_of(entry.entity) or next(filter(None, map(_problem_with, entry.ops)), None)
        if problem is not None:
            return ErrorCode.INVALID_REQUEST, problem
        (entity,) = entry.entity
        if not validate_only:
            try:
                self._known = await in_store_thread(
                    self._stored.update, lambda known: _changed(known or QuotaDocument(), entity.entity_name, entry.ops)
                )
            except TidelogError as error:
                return error_code(error), error.message
        return ErrorCode.NONE, None


def _changed(known: QuotaDocument, client_id: str | None, ops: Iterable[Any]) -> QuotaDocument:
    rates = dict(known.of(client_id))
    for op in ops:
        rates.pop(op.key, None)
        if not op.remove:
            rates[op.key] = op.value
    return known.with_rates(client_id, rates)


def _problem_of(entity: list[Any]) -> str | None:
    kinds = [one.entity_type for one in entity]
    if kinds == [_CLIENT_ID]:
        return None
    given = ", ".join(kinds) or "nothing"
    return f"Quotas are by client-id alone. This one is by {given}."


def _problem_with(op: Any) -> str | None:
    if op.key not in (PRODUCE_RATE, FETCH_RATE):
        return f"There is no quota {op.key} here: {PRODUCE_RATE} and {FETCH_RATE} are."
    if not op.remove and not (math.isfinite(op.value) and op.value >= 1 and op.value.is_integer()):
        return f"{op.key} must be a whole number of bytes a second above 0, not {op.value}."
    return None


def _is_asked_for(name: str | None, request: Any) -> bool:
    """Every component must name the client-id as this quota does; a strict request allows no quota without one."""
    components = request.components
    if not components:
        return not request.strict
    return all(one.entity_type == _CLIENT_ID and _matches(name, one) for one in components)


def _matches(name: str | None, component: Any) -> bool:
    if component.match_type == _EXACT:
        return name is not None and name == component.match
    return name is None if component.match_type == _DEFAULT else component.match_type == _ANY
