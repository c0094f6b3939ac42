"""HTTP with authentication: every route without the right grant is refused, and tokens count as they are managed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.service.http.serving import WAIT_SECONDS, Answer, Events, Served, serving
from tests.service.kafka.secured import change_accounts, grant
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

import tidelog
from tidelog.config.serve import ServeSettings
from tidelog.service.auth.access import LOCAL, SERVER, Permission
from tidelog.service.auth.accounts import adding_token, granting, make_token, removing_user, revoking, revoking_token
from tidelog.service.auth.security import Security
from tidelog.service.http.app import TABLE
from tidelog.service.http.routes import Route

PLANTED = b"PLANTED"
UPGRADE = {
    "connection": "Upgrade",
    "upgrade": "websocket",
    "sec-websocket-version": "13",
    "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
}


class Guarded:
    """A server that wants tokens, and the tokens of its users."""

    def __init__(self, served: Served, tokens: dict[str, str], ids: dict[str, str]) -> None:
        self.served = served
        self._tokens = tokens
        self.ids = ids

    def call(self, user: str | None, route: Route, path: str, body: object = b"{}") -> Answer:
        headers = {} if user is None else self.header(user)
        if route.method == "WEBSOCKET":
            return self.served.call("GET", path, None, {**headers, **UPGRADE})
        return self.served.call(route.method, path, body, headers)

    def header(self, user: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self._tokens[user]}"}


GRANTS = ("root admin *", "other admin topic:secret/ledger2", "other admin engine:other", "reader read topic:secret/*")


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    """With a topic that nobody but root and reader may know of."""
    tokens, ids = {}, {}
    with tidelog.open(tmp_path / "data") as log:
        log.topic("secret/ledger").append(PLANTED + b"-VALUE", sync=True)
        log.topic("secret/ledger").subscribe("billing").close()
        change_accounts(log, granting(*map(grant, GRANTS)))
        for user in ("root", "other", "reader", "mallory"):
            new, token = make_token(user, 0)
            change_accounts(log, adding_token(new.id, token))
            tokens[user], ids[user] = new.text, new.id
    security = Security(ServeSettings(auth="required", auth_reload_seconds=3600))
    security._failures.token_failed = lambda client: 0.0  # type: ignore[method-assign]
    with serving(tmp_path / "data", security=security) as served:
        yield Guarded(served, tokens, ids)


def concrete(route: Route) -> str:
    values = {"namespace": "secret", "name": "ledger", "subscription": "billing", "engine": "main"}
    return route.path.format_map({name: values.get(name, "0") for name in route.parameters})


def check_refusal(answer: Answer, status: int, route: Route) -> None:
    """A problem document of this status that tells of nothing."""
    assert answer.status == status, (route.name, answer)
    assert answer.headers["content-type"] == "application/problem+json"
    assert PLANTED not in answer.body
    assert {"type", "title", "status"} <= set(answer.json)


def test_every_route_without_a_grant_is_nothing_but_refused(guarded: Guarded) -> None:
    """Without a token, with a wrong one, with one of somebody without grants, and with grants on other things: refused
    by every route of the table, and lists have nothing."""
    guarded._tokens["forged"] = guarded._tokens["root"][:-1] + ("y" if guarded._tokens["root"].endswith("x") else "x")
    for route in TABLE:
        if route.is_public:
            continue
        path = concrete(route)
        check_refusal(guarded.call(None, route, path), 401, route)
        check_refusal(guarded.call("forged", route, path), 401, route)
        for user in ("mallory", "other"):
            answer = guarded.call(user, route, path)
            if route.permission is None and answer.status == 200:
                assert b'secret/ledger"' not in answer.body, route.name
                assert b"billing" not in answer.body, route.name
                continue
            check_refusal(answer, 403, route)
    described = guarded.served.ok("GET", "/v1/topics/secret/ledger", headers=guarded.header("root"))
    assert described["partitions"][0]["next_offset"] == 1
    for route in TABLE:
        if route.mode == "answer" and route.method != "DELETE":
            answer = guarded.call("root", route, concrete(route))
            assert answer.status not in (401, 403), (route.name, answer)


def test_permissions_are_those_of_the_route(guarded: Guarded) -> None:
    """Who may read reads, and neither writes nor administers."""
    reader = guarded.header("reader")
    path = "/v1/topics/secret/ledger"
    assert PLANTED in guarded.served.call("GET", f"{path}/messages?offset=0", None, reader).body
    assert guarded.served.call("POST", f"{path}/messages", {"messages": [{"value": "x"}]}, reader).status == 403
    assert guarded.served.call("DELETE", path, None, reader).status == 403
    listed = guarded.served.ok("GET", "/v1/topics", headers=reader)
    assert [one["name"] for one in listed["topics"]] == ["secret/ledger"]


def test_findings_name_files_of_the_server_for_administrators_only(guarded: Guarded, tmp_path: Path) -> None:
    """Who may read a topic sees that it is damaged, and nothing of the disk that it is on."""
    (file,) = (tmp_path / "data" / "secret" / "ledger").glob("wal.*.log")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    path = "/v1/topics/secret/ledger/verify?wait=60"
    started = guarded.served.call("POST", path, b"", guarded.header("root")).json
    for operation in (f"/v1/operations/{started['id']}?wait=60", "/v1/operations"):
        seen = guarded.served.call("GET", operation, None, guarded.header("root"))
        assert file.name.encode() in seen.body
        shown = guarded.served.call("GET", operation, None, guarded.header("reader"))
        assert shown.status == 200
        assert not [one for one in (file.name, str(tmp_path)) if one.encode() in shown.body]
        found = shown.json.get("operations", [shown.json])[0]["result"]
        assert (found["verdict"], len(found["findings"])) == ("damaged", 1)


def test_revoked_token_is_refused_without_a_restart(guarded: Guarded) -> None:
    """A revoked token and those of a removed user count no more once accounts are read again."""
    served = guarded.served
    log, security = served.node._directory, served.node.security
    assert served.call("GET", "/v1/topics", None, guarded.header("root")).status == 200
    change_accounts(log, revoking_token(guarded.ids["root"]), removing_user("reader"))
    served.in_loop(security.reload_accounts)
    assert served.call("GET", "/v1/topics", None, guarded.header("root")).status == 401
    assert served.call("GET", "/v1/topics", None, guarded.header("reader")).status == 401
    assert served.call("GET", "/v1/topics", None, guarded.header("other")).status == 200


def test_expired_token_is_refused(guarded: Guarded) -> None:
    """A token has its end, and then it is as if it had never been."""
    log, security = guarded.served.node._directory, guarded.served.node.security
    new, token = make_token("root", 0, expires_us=1)
    change_accounts(log, adding_token(new.id, token))
    guarded.served.in_loop(security.reload_accounts)
    guarded._tokens["late"] = new.text
    assert guarded.served.call("GET", "/v1/topics", None, guarded.header("late")).status == 401


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Basic cm9vdDpyb290", "Bearer tl_x_y", "Bearer a.b.c", "tl_"]
)
def test_other_proofs_are_refused_and_not_repeated(guarded: Guarded, header: str) -> None:
    """What is no token is a 401 with a challenge, and nothing of it is in the answer."""
    answer = guarded.served.call("GET", "/v1/topics", None, {"authorization": header})
    assert (answer.status, answer.headers["www-authenticate"]) == (401, 'Bearer realm="tidelog"')
    proof = header.partition(" ")[2]
    assert not proof or proof.encode() not in answer.body


def test_public_routes_need_no_token(guarded: Guarded) -> None:
    """Health checks and the description of the API are for everybody."""
    assert guarded.served.call("GET", "/health/ready").status == 200
    assert json.loads(guarded.served.call("GET", "/openapi.json").body)["openapi"]


def test_socket_in_the_directory_is_the_owner(guarded: Guarded) -> None:
    """Who can open a socket in the log directory could change its files: no token is needed there."""
    assert guarded.served.node.security.authorizer.allows(LOCAL, Permission.ADMIN, SERVER)


@pytest.mark.parametrize("how", ["token", "grant"])
def test_stream_ends_when_its_client_may_no_longer_read(guarded: Guarded, how: str) -> None:
    """A tail that was begun with a token that is revoked, or a grant that is taken back, ends."""
    served = guarded.served
    log, security = served.node._directory, served.node.security
    events = Events(served, "/v1/topics/secret/ledger/tail", guarded.header("reader"))
    events.wait_until_following()
    taken = revoking_token(guarded.ids["reader"]) if how == "token" else revoking(grant("reader read topic:secret/*"))
    change_accounts(log, taken)
    served.in_loop(security.reload_accounts)
    assert events.response.read().strip() == b""
    events.close()
    assert served.call("GET", "/v1/topics/secret/ledger", None, guarded.header("reader")).status in (401, 403)


def test_websocket_ends_when_its_client_may_no_longer_read(guarded: Guarded) -> None:
    """The connection is closed with code 1008, policy violation."""
    served = guarded.served
    log, security = served.node._directory, served.node.security
    change_accounts(log, granting(grant("reader read group:billing")))
    served.in_loop(security.reload_accounts)
    url = f"ws://127.0.0.1:{served.address.port}/v1/topics/secret/ledger/subscriptions/billing/connect"
    with connect(url, additional_headers=guarded.header("reader"), open_timeout=WAIT_SECONDS) as socket:
        change_accounts(log, revoking_token(guarded.ids["reader"]))
        served.in_loop(security.reload_accounts)
        with pytest.raises(ConnectionClosed) as caught:
            list(iter(lambda: socket.recv(WAIT_SECONDS), None))
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1008


def test_only_administrators_create_a_topic_by_using_it(guarded: Guarded) -> None:
    """Producing to a topic that does not exist creates it for those who may."""
    log, security = guarded.served.node._directory, guarded.served.node.security
    change_accounts(log, granting(grant("mallory write topic:new/*")))
    guarded.served.in_loop(security.reload_accounts)
    body = {"messages": [{"value": "x"}]}
    path = "/v1/topics/new/topic/messages"
    assert guarded.served.call("POST", path, body, guarded.header("mallory")).status == 403
    assert guarded.served.call("POST", path, body, guarded.header("root")).status == 200
    assert guarded.served.call("POST", path, body, guarded.header("mallory")).status == 200


def test_question_about_a_producer_creates_no_topic(guarded: Guarded) -> None:
    """Neither for those who may write only, nor for anybody else: it is a GET."""
    log, security = guarded.served.node._directory, guarded.served.node.security
    change_accounts(log, granting(grant("mallory write topic:new/*")))
    guarded.served.in_loop(security.reload_accounts)
    for user in ("mallory", "root"):
        path = "/v1/topics/new/topic/producers/p"
        assert guarded.served.ok("GET", path, headers=guarded.header(user)) == {"last_sequence": None}
    assert "new/topic" not in log.topics()


def test_topic_of_dead_letters_is_created_for_administrators_only(guarded: Guarded) -> None:
    """A consumer names one that does not exist: the first letter would create it."""
    log, security = guarded.served.node._directory, guarded.served.node.security
    change_accounts(log, granting(grant("reader write topic:new/*"), grant("reader read group:billing")))
    guarded.served.in_loop(security.reload_accounts)
    path = "/v1/topics/secret/ledger/subscriptions/billing/consumers"
    body = {"max_deliveries": 1, "dead_letter_topic": "new/letters"}
    assert guarded.served.call("POST", path, body, guarded.header("reader")).status == 403
    guarded.served.ok("PUT", "/v1/topics/new/letters", {}, guarded.header("root"))
    assert guarded.served.call("POST", path, body, guarded.header("reader")).status == 201


def test_naming_a_topic_of_dead_letters_tells_nobody_whether_it_exists(guarded: Guarded) -> None:
    """Who may not write there is refused in the same words in both cases."""
    log, security = guarded.served.node._directory, guarded.served.node.security
    change_accounts(log, granting(grant("other read group:billing")))
    guarded.served.in_loop(security.reload_accounts)
    guarded.served.ok("PUT", "/v1/topics/secret/ledger2", {}, guarded.header("root"))
    path = "/v1/topics/secret/ledger2/subscriptions/billing/consumers"
    said = []
    for letters in ("secret/ledger", "secret/nothing"):
        body = {"max_deliveries": 1, "dead_letter_topic": letters}
        answer = guarded.served.call("POST", path, body, guarded.header("other"))
        said.append((answer.status, answer.body.replace(letters.encode(), b"")))
    assert said[0] == said[1]
    assert said[0][0] == 403
