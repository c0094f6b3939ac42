"""The application: problems, permissions, limits, origins, and hostile requests to every route."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Container
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest
from tests.campaign import examples, first_seed
from tests.service.http.serving import WAIT_SECONDS, Answer, Served, eventually, serving
from websockets.sync.client import connect

from tidelog import errors
from tidelog.errors import InternalError, StoreUnavailableError, TidelogError
from tidelog.service.auth.access import Kind, NotAuthenticatedError, Permission, Principal, Resource
from tidelog.service.http.app import TABLE
from tidelog.service.http.call import Peer
from tidelog.service.http.problems import HttpError, problem_of
from tidelog.service.http.routes import Route, Router, RouteTable
from tidelog.service.http.server import _LimitedProtocol
from tidelog.service.http.service import HttpSettings

PROBLEM = {"type", "title", "status", "detail", "error"}


def is_problem(answer: Answer) -> bool:
    document = answer.json
    return (
        answer.headers["content-type"] == "application/problem+json"
        and PROBLEM <= set(document) <= PROBLEM | {"hint"}
        and document["status"] == answer.status
    )


def test_every_refusal_is_a_problem_document(served: Served) -> None:
    """A wrong path, method, media type, query, body or name is answered with what is wrong, and the fix."""
    wrong = [
        ("GET", "/nothing", None, 404),
        ("POST", "/v1/topics", b"{}", 405),
        ("PUT", "/v1/topics/shop/orders", b"{", 400),
        ("PUT", "/v1/topics/shop/orders", b'{"more": 1}', 400),
        ("PUT", "/v1/topics/shop/.x", b"{}", 400),
        ("PUT", "/v1/topics/shop%2Fa/b", b"{}", 400),
        ("GET", "/v1/topics?limit=x", None, 400),
        ("GET", "/v1/topics?limit=1&limit=2", None, 400),
        ("GET", "/v1/topics?unknown=1", None, 400),
        ("GET", "/v1/topics/shop/orders", None, 404),
    ]
    for method, path, body, status in wrong:
        answer = served.call(method, path, body, {"content-type": "application/json"})
        assert (answer.status, is_problem(answer)) == (status, True), (method, path, answer)
    assert served.call("POST", "/v1/topics").headers["allow"] == "GET"


def test_every_error_of_the_library_has_a_status() -> None:
    """Errors are told by what the client does next: its own mistakes are 4xx, what may succeed later is 503."""
    by_next_step: dict[type[TidelogError], Container[int]] = {
        errors.InputError: range(400, 500),
        errors.RetryError: (423, 503, 507),
        errors.ReopenError: (409, 503),
        errors.ConflictError: (409,),
        errors.DataError: (410, 500),
    }
    for kind, statuses in by_next_step.items():
        for error in [kind, *_below(kind)]:
            made = error.__new__(error)
            vars(made).update(vars(TidelogError("text")), byte=1, _place="/secret/path", first=1, last=2, unit="offset")
            problem = problem_of(made)
            expected: Container[int] = (401, 403, 502) if issubclass(error, errors.AccessDeniedError) else statuses
            assert problem.status in expected, error
            assert "secret" not in problem.detail
            assert problem.error in vars(errors)


def _below(kind: type[TidelogError]) -> list[type[TidelogError]]:
    return [one for below in kind.__subclasses__() for one in (below, *_below(below))]


def test_bug_is_logged_and_not_told(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception that nobody expected is a 500 that says nothing of it; the log has it."""

    def fail(name: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(served.node.http, "topic", fail)
    answer = served.call("GET", "/v1/topics/shop/orders")
    assert (answer.status, answer.json["error"], is_problem(answer)) == (500, InternalError.__name__, True)
    assert b"secret" not in answer.body
    assert "a secret" in caplog.text


def test_what_may_succeed_later_says_when(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that gives no answer is 503 with Retry-After."""

    def fail(name: object) -> None:
        raise StoreUnavailableError("no answer", hint="wait")

    monkeypatch.setattr(served.node.http, "topic", fail)
    answer = served.call("GET", "/v1/topics/shop/orders")
    assert (answer.status, answer.headers["retry-after"], answer.json["hint"]) == (503, "1", "wait")


class Rules:
    """One user, who may read some topics."""

    def __init__(self) -> None:
        self.audited: list[tuple[str, str, str, int]] = []

    def rule(self, served: Served) -> None:
        """Has a server ask here."""
        service = served.node.http
        service.authenticate, service.authorizer, service.audit = self.authenticate, self, self.audit

    async def authenticate(self, peer: Peer) -> Principal:
        if peer.headers.get("authorization") != "Bearer good":
            raise NotAuthenticatedError("who are you?")
        return Principal("reader", "token")

    def allows(self, principal: Principal, permission: Permission | None, resource: Resource) -> bool:
        return permission in (None, Permission.READ) and resource.name.startswith("open/")

    def allows_any(self, principal: Principal, permission: Permission, kind: Kind) -> bool:
        return permission is Permission.READ and kind is Kind.TOPIC

    def audit(self, principal: Principal, peer: Peer, route: str, resource: Resource, status: int) -> None:
        self.audited.append((str(principal), route, resource.name, status))


def concrete(route: Route) -> str:
    """A path that the route matches."""
    values = {"namespace": "closed", "name": "orders"}
    return route.path.format_map({name: values.get(name, "1") for name in route.parameters})


@pytest.mark.parametrize("route", [one for one in TABLE if one.method != "WEBSOCKET"], ids=lambda one: one.name)
def test_route_without_permission_answers_nothing(tmp_path: Path, route: Route) -> None:
    """Every route that is not public refuses who is unknown, and every one with a permission who lacks it."""
    rules = Rules()
    with serving(tmp_path / "data") as served:
        rules.rule(served)
        path = concrete(route)
        unknown = served.call(route.method, path, b"{}")
        known = served.call(route.method, path, b"{}", {"authorization": "Bearer good"})
        if route.is_public:
            assert unknown.status in (200, 503)
            return
        assert (unknown.status, unknown.headers["www-authenticate"]) == (401, 'Bearer realm="tidelog"')
        if route.permission is not None:
            assert (known.status, known.json["error"]) == (403, "AccessDeniedError")
    # A route without a permission of its own may show nothing, or refuse: the handler decides.
    expected = [401, *([403] if route.permission is not None or known.status == 403 else [])]
    assert [status for _, _, _, status in rules.audited][:2] == expected


def test_lists_have_only_what_the_client_may_read(tmp_path: Path) -> None:
    """A list is not refused; it is as if the other topics did not exist."""
    with serving(tmp_path / "data") as served:
        for name in ("open/a", "closed/b"):
            served.ok("PUT", f"/v1/topics/{name}", {})
        Rules().rule(served)
        listed = served.ok("GET", "/v1/topics", headers={"authorization": "Bearer good"})
    assert [one["name"] for one in listed["topics"]] == ["open/a"]


def test_pages_of_other_origins_are_refused(served: Served) -> None:
    """A page that a user happens to visit cannot talk to a server on this machine."""
    host = f"127.0.0.1:{served.address.port}"
    body, kind = b"x", "text/plain"
    path = "/v1/topics/shop/orders/messages"
    foreign = served.call("POST", path, body, {"origin": "http://evil.example", "content-type": kind})
    assert (foreign.status, is_problem(foreign)) == (403, True)
    assert served.call("POST", path, body, {"origin": f"http://{host}", "content-type": kind}).status == 200


def test_console_behind_a_proxy_has_the_advertised_origin(served: Served) -> None:
    """A proxy that sends another host on does not make the server's own pages foreign."""
    served.node.http.advertised = "https://log.example.org"
    assert served.call("GET", "/v1/topics", headers={"origin": "https://log.example.org"}).status == 200
    assert served.call("GET", "/v1/topics", headers={"origin": "https://evil.example"}).status == 403


def test_names_that_are_made_to_point_here_are_refused(served: Served) -> None:
    """A page whose own name was made to point to this machine has the right origin, and is refused all the same."""
    port = served.address.port
    named = {"host": f"evil.example:{port}", "origin": f"http://evil.example:{port}"}
    refused = served.call("GET", "/v1/topics", headers=named)
    assert (refused.status, is_problem(refused)) == (421, True)
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
        assert served.call("GET", "/v1/topics", headers={"host": host}).status == 200


def test_host_and_origin_that_cannot_be_understood_are_refused(served: Served) -> None:
    """They are nobody's, and no mistake of the server's."""
    for origin in ("http://[", "null", ""):
        assert served.call("GET", "/v1/topics", headers={"origin": origin}).status == 403
        assert served.call("GET", "/v1/topics", headers={"origin": origin, "host": ""}).status == 403
    assert served.call("GET", "/v1/topics", headers={"host": "["}).status == 421


def test_head_over_the_limit_is_refused_before_it_is_complete(served: Served) -> None:
    """Nobody has to prove anything before the head is there, so it must not fill the memory."""
    with closing(served.raw()) as raw:
        raw.sendall(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n")
        with contextlib.suppress(ConnectionError):  # the answer may be cut by what was sent after it
            for _ in range(2000):
                raw.sendall(b"x: " + b"y" * 10_000 + b"\r\n")
            raise AssertionError("the server read 20 MB of a head")
    with closing(served.raw()) as raw:
        raw.sendall(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 60_000 + b"\r\n\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_head_that_trickles_is_given_up(tmp_path: Path) -> None:
    """A byte now and then does not keep a connection whose request never comes."""
    with serving(tmp_path / "data", HttpSettings(idle_seconds=1)) as served, closing(served.raw()) as raw:
        ends_at = time.monotonic() + WAIT_SECONDS
        raw.sendall(b"GET /health/live HTTP/1.1\r\nx: ")
        raw.settimeout(0.005)
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < ends_at:
                raw.sendall(b"y")
                with contextlib.suppress(TimeoutError):
                    assert raw.recv(100) == b""
                    return
            raise AssertionError("the connection is still open")


def test_websocket_is_not_closed_as_an_idle_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client may have nothing to say for hours: only connections that wait for a request have a limit."""
    late: list[bool] = []
    monkeypatch.setattr(_LimitedProtocol, "timeout_keep_alive_handler", lambda self: late.append(self._is_websocket))
    with serving(tmp_path / "data", HttpSettings(idle_seconds=0.05)) as served:
        served.produce("shop/orders", "a")
        url = f"ws://127.0.0.1:{served.address.port}/v1/topics/shop/orders/subscriptions/billing/connect"
        with connect(url) as socket:
            socket.recv(WAIT_SECONDS)
            seen = len(late)
            with closing(served.raw()):  # its time begins after the other's, and so it ends
                served.in_loop(lambda: eventually(lambda: len(late) > seen))
    assert True not in late


def test_handshake_with_a_line_that_is_too_long_is_answered(served: Served) -> None:
    """It must not wait for ever without an answer: nobody knows yet who it is."""
    lines = [
        f"GET /v1/topics/shop/orders/subscriptions/billing/connect?options={'x' * 10_000} HTTP/1.1",
        "host: localhost",
        "connection: Upgrade",
        "upgrade: websocket",
        "sec-websocket-version: 13",
        "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
    ]
    with closing(served.raw()) as raw:
        raw.sendall("\r\n".join([*lines, "", ""]).encode())
        assert raw.recv(1000).startswith(b"HTTP/1.1 431 ")


def test_body_over_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """By its announced length at once, and by what arrives when that was not said."""
    with serving(tmp_path / "data", HttpSettings(max_body_bytes=10_000)) as served:
        path = "/v1/topics/shop/orders/messages"
        octets = {"content-type": "application/octet-stream"}
        assert served.call("POST", path, bytes(10_001), octets).status == 413
        with closing(served.connect()) as connection:
            connection.request("POST", path, iter([bytes(6000), bytes(6000)]), octets, encode_chunked=True)
            assert connection.getresponse().status == 413
        assert served.call("POST", path, bytes(10_000), octets).status == 200
        announced = {**octets, "content-length": str(1 << 62)}
        with closing(served.connect()) as connection:
            connection.request("POST", path, b"", announced)
            assert connection.getresponse().status == 413


def test_bodies_together_have_a_limit(tmp_path: Path) -> None:
    """Beyond it a request is refused for now, and the memory is free again afterwards."""
    with serving(tmp_path / "data", HttpSettings(max_buffered_bytes=1000)) as served:
        path = "/v1/topics/shop/orders/messages"
        octets = {"content-type": "application/octet-stream"}
        refused = served.call("POST", path, bytes(1001), octets)
        assert (refused.status, refused.json["error"]) == (503, "BackpressureError")
        for _ in range(3):
            assert served.call("POST", path, bytes(900), octets).status == 200


def test_body_that_does_not_arrive_is_given_up(tmp_path: Path) -> None:
    """A client that stops in the middle of its body is answered, and does not hold memory for ever."""
    with serving(tmp_path / "data", HttpSettings(body_seconds=0.05)) as served, closing(served.raw()) as raw:
        raw.sendall(b"PUT /v1/topics/a/b HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        assert raw.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_connection_without_a_request_is_closed(tmp_path: Path) -> None:
    """One that is idle, one that never begins, and one that never ends its head."""
    with serving(tmp_path / "data", HttpSettings(idle_seconds=0.05)) as served:
        for beginning in (b"", b"GET / HT", b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"):
            with closing(served.raw()) as raw, contextlib.suppress(ConnectionError):
                raw.sendall(beginning)
                while raw.recv(1000):
                    pass


def test_connections_beyond_the_limit_are_closed(tmp_path: Path) -> None:
    """Those that are there are served on."""
    with serving(tmp_path / "data", HttpSettings(max_connections=2)) as served:
        connections = [served.connect() for _ in range(2)]
        for connection in connections:
            connection.request("GET", "/health/live")
            assert connection.getresponse().read() == b"live\n"
        with closing(served.raw()) as raw:
            assert raw.recv(10) == b""
        connections[0].request("GET", "/health/live")
        assert connections[0].getresponse().read() == b"live\n"
        for connection in connections:
            connection.close()

        async def room() -> None:
            await eventually(lambda: served.node._http.connections < 2)

        served.in_loop(room)
        assert served.call("GET", "/health/live").status == 200


def test_bytes_that_are_no_request_are_refused(served: Served) -> None:
    """They end their connection and no other."""
    with closing(served.raw()) as raw:
        raw.sendall(b"\x00\x01\x02 not http\r\n\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 400 ")
        while raw.recv(1000):
            pass
    assert served.call("GET", "/health/live").status == 200


HOSTILE_BODIES = [
    b"",
    b"null",
    b"[]",
    b"{}",
    b"\xff\xfe",
    b"[" * 5000,
    b'{"messages":[]}',
    b'{"messages":[{"value":1}]}',
    b'{"messages":[{"value":"x","encoding":"base64"}]}',
    b'{"messages":[{"value":"\\ud800"}]}',
    b'{"messages":[{"value":"a","key":"\\ud800","headers":{"\\ud800":"x"}}]}',
    b'{"messages":[{"value":"a","timestamp":"0001-01-01T00:00:00+14:00"}]}',
    b'{"messages":[{"value":"a","deliver_at":"9999-12-31T23:59:59-14:00"}]}',
    b'{"settings":{"retention_seconds":1e400}}',
    b'{"settings":{"retention_seconds":99999999999999999999999}}',
    b'{"settings":{"self":1,"name":2}}',
    b'{"partitions":9999999999}',
    b'{"entries":[{"seq":99999999999999999999999,"entry":{"type":"CreateBucket","bucket":"x"}}]}',
    b'{"entries":[{"seq":2,"entry":{"type":"PutObject","bucket":"photos","key":"","data":"AA=="}}]}',
    b'{"entries":[{"seq":2,"entry":{"type":"Batch","entries":[]}}]}',
    b'{"entries":[{"seq":2,"entry":{"type":"PutObject","bucket":"photos","key":"a","data":"AA==","metadata":{"a":[1]}}}]}',
    b'{"seq":-1}',
    b'{"seq":18446744073709551616}',
    b'{"name":"../../x","discard":true}',
    b'{"offsets":[0,99]}',
    b'{"kind":"shared","start":"\\ud800","consumer":"c"}',
    b'{"kind":"shared","max_unacked":-1}',
    b'{"filter":{"a":"\\ud800"}}',
    b'{"position":"9999999999999999999"}',
    b'{"messages":[[0,0]],"cumulative":[[0,9223372036854775806]]}',
    b"\x91\x91\xc4\x01a",
    b"\xc1\xc1",
    b"\xdd\xff\xff\xff\xff",
]
HOSTILE_TEXTS = [
    *(
        "",
        "0",
        "-1",
        "1",
        "-0",
        "9" * 30,
        "1e9",
        "nan",
        "inf",
        "true",
        "null",
        "earliest",
        "latest",
        "%00",
        "%ff",
        "..",
        "%2F",
    ),
    *("2026-01-01T00:00:00Z", "0001-01-01T00:00:00+14:00", "{}", '{"0":0}', '{"0":99}', "a" * 300, "\u00e9", "shipped"),
]


def random_request(chance: random.Random, route: Route) -> tuple[str, bytes, dict[str, str]]:
    """A path, a body and headers that somebody might send to a route."""

    def text() -> str:
        chosen = chance.choice(HOSTILE_TEXTS)
        return chosen if chosen.startswith("%") else quote(chosen, safe="")

    usual = {
        "namespace": "shop",
        "name": "orders",
        "engine": "main",
        "subscription": "billing",
        "bucket": "photos",
        "key": "cat",
    }
    values = {name: usual.get(name, text()) if chance.random() < 0.8 else text() for name in route.parameters}
    names = [*(field for field in route.query.__struct_fields__), "other"]
    chosen = [name for name in names if chance.random() < 0.3]
    query = "&".join(f"{name}={text()}" for name in chosen if name not in ("wait", "timeout", "seconds"))
    kinds = ("application/json", "application/msgpack", "application/octet-stream", "text/plain", "x", "")
    headers = {"content-type": chance.choice(kinds)} if chance.random() < 0.7 else {"content-type": "application/json"}
    if chance.random() < 0.2:
        headers["last-event-id"] = chance.choice(["0:0", "x", "0:99999999999999999999", "7:1", ","])
    return route.path.format_map(values) + "?" + query, chance.choice(HOSTILE_BODIES), headers


def test_hostile_requests_are_never_a_server_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a client sends to any route, it is an answer that the table declares or a refusal, never a 500."""
    chance = random.Random(first_seed())
    with serving(tmp_path / "data", engine=tmp_path / "engine") as served:
        made = {"seq": 1, "entry": {"type": "CreateBucket", "bucket": "photos"}}
        served.ok("POST", "/v1/engines/main/apply", {"entries": [made]})
        attack(served, chance)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def attack(served: Served, chance: random.Random) -> None:
    """Sends requests to all routes."""
    served.produce("shop/orders", "one", "two")
    for route in TABLE:
        if route.mode in ("stream", "socket"):
            continue
        for _ in range(examples(15)):
            path, body, headers = random_request(chance, route)
            with closing(served.connect()) as connection:
                connection.request(route.method, path, body, headers)
                response = connection.getresponse()
                content = response.read()
            assert response.status < 500 or response.status == 503, (route.name, path, body, headers, content)
            if response.status >= 400 and not route.is_public:
                assert set(json.loads(content)) >= PROBLEM, (path, content)
    assert served.call("GET", "/health/ready").status == 200


def test_paths_are_matched_by_segments() -> None:
    """A fixed segment wins over one in braces; a name never takes a slash."""
    table = RouteTable("test")
    for path in ("/a/{x}", "/a/fixed", "/a/{x}/b", "/a/fixed/{y}/c"):

        async def handler(call: object) -> None:
            """Does nothing."""

        table.add("GET", path, None)(handler)
    router = Router(list(table))

    def found(path: str) -> tuple[str, dict[str, str]]:
        match = router.find("GET", path)
        return match.route.path, match.path

    assert found("/a/fixed") == ("/a/fixed", {})
    assert found("/a/fixed/b") == ("/a/{x}/b", {"x": "fixed"})
    assert found("/a/fixed/b/c") == ("/a/fixed/{y}/c", {"y": "b"})
    assert found("/a/%2Fz") == ("/a/{x}", {"x": "/z"})
    for path in ("/a", "/a/x/y", "/", "", "/a/x/b/"):
        with pytest.raises(HttpError):
            router.find("GET", path)


def test_openapi_describes_every_route(served: Served) -> None:
    """The document has each route with its parameters, and every reference in it leads somewhere."""
    document = served.ok("GET", "/openapi.json")
    for route in TABLE:
        method = "get" if route.method == "WEBSOCKET" else route.method.lower()
        operation = document["paths"][route.path][method]
        named = {one["name"] for one in operation["parameters"]}
        assert named == {*route.parameters, *route.query.__struct_fields__}
        assert operation["x-permission"] == (route.permission or "none")
    text = json.dumps(document)
    for part in text.split('"$ref": "#/components/schemas/')[1:]:
        assert part.partition('"')[0] in document["components"]["schemas"]
    ids = [one["operationId"] for path in document["paths"].values() for one in path.values()]
    assert len(ids) == len(set(ids))


def test_stopping_answers_what_was_begun(tmp_path: Path) -> None:
    """A request that arrives slowly while the server stops is still answered, and then its connection is closed."""
    with serving(tmp_path / "data") as served:
        raw = served.raw()
        raw.sendall(b"PUT /v1/topics/a/b HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{")

        async def begun() -> None:
            await eventually(lambda: len(served.node._http.state.tasks) == 1)
            served.node.http.begin_to_stop()

        served.in_loop(begun)
        assert served.call("GET", "/health/ready").status == 503
        raw.sendall(b"}")
        assert raw.recv(1000).startswith(b"HTTP/1.1 201 ")
    raw.settimeout(WAIT_SECONDS)
    while raw.recv(1000):
        pass
    raw.close()
