"""Secrets appear nowhere: planted in settings, URLs, headers and requests, and looked for in all that comes out.

Requests are made for every route of the table, with the secret in each place where a client may have one; what comes
out are answers, pages, the log with the audit log, metrics and traces.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.cli.conftest import Cli
from tests.cli.conftest import cli as cli
from tests.service.http.serving import Answer, Served, serving
from tests.service.http.test_security import UPGRADE, concrete
from tests.service.kafka.secured import change_accounts, grant

import tidelog
from tidelog.config.serve import ServeSettings
from tidelog.service.auth.accounts import adding_token, granting, make_token
from tidelog.service.auth.security import Security
from tidelog.service.http.app import TABLE
from tidelog.service.http.routes import Route
from tidelog.tracing import start_tracing, stop_tracing

SECRET = "PLANTED5ecret0123456789abcdef"
IN_BASE64 = base64.b64encode(f"user:{SECRET}".encode()).decode()
PLANTED = (SECRET, IN_BASE64)
JSON = {"content-type": "application/json"}
HEADERS: dict[str, dict[str, str]] = {
    "bearer": {"authorization": f"Bearer {SECRET}"},
    "basic": {"authorization": f"Basic {IN_BASE64}"},
    "cookie": {"cookie": f"session={SECRET}"},
    "other": {"x-api-key": SECRET, "last-event-id": SECRET, "traceparent": SECRET, "origin": f"http://{SECRET}"},
}
QUERIES = (f"token={SECRET}", f"wait={SECRET}", f"seq={SECRET}", f"partition={SECRET}", f"encoding={SECRET}")
BODIES = (
    f'{{"password": "{SECRET}"}}'.encode(),
    f'{{"partitions": "{SECRET}", "seq": "{SECRET}", "entries": "{SECRET}", "messages": "{SECRET}"}}'.encode(),
    f'{{"messages": [["{SECRET}"]], "kind": "{SECRET}", "offsets": ["{SECRET}"]}}'.encode(),
    SECRET.encode(),
)


class Watched:
    """A server that asks who one is, and the token of an administrator, who may know nothing of the secret either."""

    def __init__(self, served: Served, token: str, spans: InMemorySpanExporter) -> None:
        self.served = served
        self.root = {"authorization": f"Bearer {token}"}
        self.spans = spans
        self.seen: list[tuple[str, Answer]] = []

    def call(self, route: Route, query: str, body: bytes, headers: dict[str, str]) -> None:
        path = f"{concrete(route)}?{query}" if query else concrete(route)
        method, sent = route.method, {**JSON, **headers}
        if route.method == "WEBSOCKET":
            method, sent, body = "GET", {**headers, **UPGRADE}, b""
        self.seen.append((f"{route.name} ?{query} {headers}", self.served.call(method, path, body, sent)))


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """Secrets are in the settings, too."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("TIDELOG_TOKEN", SECRET)
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with tidelog.open(tmp_path / "data", store=(tmp_path / "store").as_uri(), metadata="bucket") as log:
        log.topic("secret/ledger").append(b"x", sync=True)
        change_accounts(log, granting(grant("root admin *")))
        new, token = make_token("root", 0)
        change_accounts(log, adding_token(new.id, token))
    security = Security(ServeSettings(auth="required", auth_reload_seconds=3600))
    security._failures.token_failed = lambda client: 0.0  # type: ignore[method-assign]
    start_tracing(provider)
    try:
        with serving(tmp_path / "data", None, security, store=(tmp_path / "store").as_uri()) as served:
            yield Watched(served, new.text, exporter)
    finally:
        stop_tracing()
        provider.shutdown()


def test_secret_planted_in_any_request_appears_nowhere(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    """Wherever a client puts its secret, no answer, page, log line, audit record, metric or span has it."""
    caplog.set_level(logging.DEBUG)
    for route in TABLE:
        if route.method == "DELETE" or route.mode == "stream":
            continue  # the topic is needed; a stream does not end
        for headers in HEADERS.values():
            watched.call(route, "", b"{}", headers)
        for query in QUERIES:
            watched.call(route, query, b"{}", watched.root)
        for body in BODIES if route.body is not None else ():
            watched.call(route, "", body, watched.root)
    for path in ("/", "/metrics", "/v1", "/openapi.json", "/v1/operations", "/v1/topics/secret/ledger", "/nothing"):
        watched.seen.append((path, watched.served.call("GET", f"{path}?token={SECRET}", None, watched.root)))
        watched.seen.append((path, watched.served.call("GET", path, None, watched.root)))
    assert len({answer.status for _, answer in watched.seen}) > 3, "requests of all kinds were made"
    spoken = [what for what, answer in watched.seen if any(one in str(answer) for one in PLANTED)]
    assert spoken == []
    logged = [record for record in caplog.records if any(one in _whole(record) for one in PLANTED)]
    assert logged == []
    traced = watched.spans.get_finished_spans()
    assert traced
    assert not any(one in span.to_json() for one in PLANTED for span in traced)


def _whole(record: logging.LogRecord) -> str:
    """All of a record: what a formatter of JSON would write, too."""
    return f"{record.getMessage()} {record.__dict__}"


COMMANDS = (
    ("topic", "list", "--server", f"http://user:{SECRET}@127.0.0.1:1"),
    ("topic", "list", "--server", f"http://127.0.0.1:1/?token={SECRET}"),
    ("topic", "list", "--server", "http://127.0.0.1:1", "--token", SECRET),
    ("topic", "list", "--store", f"s3://key:{SECRET}@bucket/prefix"),
    ("topic", "list", "--store", f"s3://bucket/prefix?secret_access_key={SECRET}"),
    ("topic", "list", "--store", f"http://key:{SECRET}@host/bucket"),
    ("topic", "list", "--metadata", f"etcd://user:{SECRET}@127.0.0.1:1"),
    ("topic", "list", "--metadata", f"postgres://user:{SECRET}@127.0.0.1/db"),
    ("engine", "status", "--store", f"s3://key:{SECRET}@bucket/prefix"),
    ("serve", "--store", f"s3://key:{SECRET}@bucket/prefix", "--http", "127.0.0.1:0", "--kafka", "127.0.0.1:0"),
    ("topic", "list", "--store", f"s3://bucket/prefix#{SECRET}@x"),
    ("config",),
    ("config", "--json"),
    ("doctor", "--json"),
)


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda given: " ".join(given).replace(SECRET, "SECRET"))
def test_secret_given_to_a_command_is_not_printed(
    arguments: tuple[str, ...], cli: Cli, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the environment, in an option or in a URL: output, errors, hints and the log do not repeat it."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("TIDELOG_STORE_SECRET_ACCESS_KEY", SECRET)
    ran = cli(*arguments)
    assert SECRET not in ran.err
    assert SECRET.encode() not in ran.out
    assert not any(SECRET in _whole(record) for record in caplog.records)


@pytest.mark.parametrize("command", [("topic", "list"), ("engine", "status"), ("doctor",), ("config",), ("verify",)])
def test_secret_in_the_url_of_a_setting_is_not_printed(
    command: tuple[str, ...], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store's URL with a key in it is refused, by whatever way it came, and not repeated."""
    monkeypatch.setenv("TIDELOG_STORE", f"s3://key:{SECRET}@bucket/prefix")
    ran = cli(*command)
    assert (SECRET in ran.err, SECRET.encode() in ran.out) == (False, False)
