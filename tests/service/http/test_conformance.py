"""The API is held to its own description: generated requests, fitting and unfit ones, against a real server.

Each operation of /openapi.json gets requests that schemathesis makes from its schema. In most of them the names in the
path are those of things that exist, so that they reach what is behind the first check.
"""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import hypothesis
import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import content_type_conformance, response_schema_conformance, status_code_conformance
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from schemathesis.schemas import APIOperation
from tests.campaign import IS_DEEP, SEED, examples
from tests.service.http.serving import WAIT_SECONDS, Served, serving

from tidelog.service.http.app import TABLE
from tidelog.service.http.openapi import describe

Case = schemathesis.Case[Any]
Operation = APIOperation[Any, Any, Any, Any]
CHECKS: list[Any] = [status_code_conformance, content_type_conformance, response_schema_conformance]
TOPICS = ("orders", "letters", "parts")
KNOWN = {
    "namespace": ["default"],
    "name": list(TOPICS),
    "subscription": ["billing"],
    "engine": ["main"],
    "bucket": ["photos"],
    "key": ["a.png"],
    "report": ["nightly"],
    "producer": ["app"],
}
CONSUMERS = "/v1/topics/default/orders/subscriptions/billing/consumers"
_DOCUMENT: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(describe(TABLE)))
_SCHEMA = schemathesis.openapi.from_dict(_DOCUMENT)
OPERATIONS: list[Operation] = [found.ok() for found in _SCHEMA.get_all_operations() if isinstance(found, Ok)]


def can_be_unfit(operation: Operation) -> bool:
    """Whether there is anything that a client could get wrong: a body of JSON, or a parameter that is not text."""
    body = operation.definition.raw.get("requestBody", {}).get("content", {})
    has_schema = any("schema" in one for one in body.values())
    return has_schema or any(
        one["in"] == "query" and one["schema"].get("type") not in ("string", "number")
        for one in operation.definition.raw.get("parameters", ())
    )


def fill(served: Served) -> dict[str, list[str]]:
    """Things for requests to be about, as far as earlier requests took them away; their names in paths."""
    while running := [one for one in served.ok("GET", "/v1/operations")["operations"] if one["state"] == "running"]:
        served.ok("GET", f"/v1/operations/{running[0]['id']}?wait={WAIT_SECONDS}")
    for name in TOPICS:
        wanted = {"partitions": 2 if name == "parts" else 1}
        if served.call("GET", f"/v1/topics/default/{name}").status == HTTPStatus.NOT_FOUND:
            served.ok("PUT", f"/v1/topics/default/{name}", wanted)
        served.ok("POST", f"/v1/topics/default/{name}/open")
        served.produce(f"default/{name}", "a", "b")
    served.ok("PUT", "/v1/reports/nightly", {"ok": True})
    served.call("DELETE", CONSUMERS.rpartition("/")[0])
    made = served.ok("POST", CONSUMERS, {"kind": "shared"})
    engine = "/v1/engines/main"
    marks = served.ok("POST", f"{engine}/rollback", {"seq": served.ok("GET", engine)["low_water_mark"]})
    seq = marks["applied_seq"] + 1
    put = {"type": "PutObject", "bucket": "photos", "key": "a.png", "data": "AAAA"}
    entries = [{"seq": seq, "entry": {"type": "CreateBucket", "bucket": "photos"}}, {"seq": seq + 1, "entry": put}]
    served.call("POST", f"{engine}/apply", {"entries": entries})  # refused where no seq is left
    return {**KNOWN, "consumer": [made["id"]]}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all operations, with a store and an engine."""
    place = tmp_path_factory.mktemp("conformance")
    with serving(place / "data", store=(place / "bucket").as_uri(), engine=place / "engine") as running:
        yield running


class Caller:
    """Sends the requests that were made, and checks the answers."""

    def __init__(self, served: Served) -> None:
        self._url = f"http://{served.address.host}:{served.address.port}"
        self._session = requests.Session()

    def close(self) -> None:
        self._session.close()

    def check(self, case: Case) -> None:
        """Fails if the answer is not one that the description allows."""
        if isinstance(case.query.get("wait"), int | float):
            case.query["wait"] = min(case.query["wait"], 0.01)  # a long poll that waits tells nothing more
        arguments = case.as_transport_kwargs(base_url=self._url)
        with self._session.request(**arguments, stream=True, timeout=WAIT_SECONDS) as response:
            if response.headers.get("content-type") == "text/event-stream":
                assert response.status_code == HTTPStatus.OK
                return  # it does not end
            may_succeed_later = response.status_code == HTTPStatus.SERVICE_UNAVAILABLE
            assert response.status_code < 500 or may_succeed_later, (arguments, response.text)
            assert not may_succeed_later or "retry-after" in response.headers
            case.validate_response(response, checks=CHECKS)


def send_generated(served: Served, operation: Operation, mode: GenerationMode, count: int) -> None:
    """So many requests to one operation, and ten times as many in a campaign."""
    caller = Caller(served)
    names = fill(served)
    known = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in names.items()})

    @settings(
        max_examples=examples(count), suppress_health_check=list(HealthCheck), phases=[Phase.generate], database=None
    )
    @given(case=operation.as_strategy(mode), known=known | known | st.just({}))
    def send(case: Case, known: dict[str, str]) -> None:
        given_path = case.path_parameters or {}
        case.path_parameters = {name: known.get(name, value) for name, value in given_path.items()}
        caller.check(case)

    if IS_DEEP:
        hypothesis.seed(SEED)(send)
    try:
        send()
    finally:
        caller.close()


def named(operation: Operation) -> str:
    return f"{operation.method.upper()} {operation.path}"


def test_every_route_is_described_so_that_requests_can_be_made() -> None:
    """None is left out because its description makes no sense."""
    assert len(OPERATIONS) == len(TABLE)


@pytest.mark.parametrize("operation", OPERATIONS, ids=named)
def test_answers_are_those_of_the_description(served: Served, operation: Operation) -> None:
    """No request makes the server fail, and every answer has a form that /openapi.json announces."""
    send_generated(served, operation, GenerationMode.POSITIVE, 3)
    if can_be_unfit(operation):
        send_generated(served, operation, GenerationMode.NEGATIVE, 3)


@pytest.mark.long
@pytest.mark.parametrize("operation", OPERATIONS, ids=named)
def test_many_answers_are_those_of_the_description(served: Served, operation: Operation) -> None:
    """The same, with a hundred requests to each operation."""
    send_generated(served, operation, GenerationMode.POSITIVE, 10)
    if can_be_unfit(operation):
        send_generated(served, operation, GenerationMode.NEGATIVE, 10)
