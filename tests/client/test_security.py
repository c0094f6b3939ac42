"""A client of a server with TLS and authentication: tokens, grants, a private authority, and a store behind it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.cli.conftest import Cli
from tests.clients.conftest import Service
from tests.service.auth.certificates import Authority
from tests.service.kafka.secured import change_accounts, grant

import tidelog
from tidelog.service.auth.accounts import adding_token, granting, make_token

WAIT_SECONDS = 120
WRONG = "PLANTED-wrong-token"


class Protected(NamedTuple):
    """A server that wants a token over TLS, and what its clients have."""

    url: str
    ca: str
    writer: str
    """The token of somebody who may do everything with topics and subscriptions of `shop`."""
    reader: str
    """The token of somebody who may read shop/orders."""
    directory: Path

    def connect(self, token: str | None = None, **options: Any) -> tidelog.Client:
        return tidelog.connect(self.url, token=token or self.writer, tls_ca=self.ca, **options)


@pytest.fixture(scope="module")
def protected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Protected]:
    """One `tidelog serve` for all tests here, with a store."""
    root = tmp_path_factory.mktemp("secured")
    directory, store = root / "served", f"file://{root / 'store'}"
    authority = Authority(root / "certificates")
    files = authority.signed("server", "server", "localhost")
    (writer, writing), (reader, reading) = make_token("writer", 0), make_token("reader", 0)
    grants = ("writer admin topic:shop/*", "writer admin group:*", "writer admin engine:*", "reader read topic:shop/*")
    with tidelog.open(directory, store=store) as log:
        change_accounts(
            log, adding_token(writer.id, writing), adding_token(reader.id, reading), granting(*map(grant, grants))
        )
    options = ("--auth", "required", "--tls-cert", files.cert, "--tls-key", files.key, "--store", store)
    service = Service(directory, *options, "--engine", f"photos={root / 'engine'}")
    try:
        yield Protected(service.start().http, authority.path, writer.text, reader.text, directory)
    finally:
        service.close()


class TestAccess:
    def test_messages_are_appended_read_and_acknowledged_with_a_token(self, protected: Protected) -> None:
        """Requests and the WebSocket of a consumer both carry the token, over TLS."""
        with protected.connect() as log:
            topic = log.topic("shop/sync")
            assert topic.append_many([b"a", b"b"], sync=True) == [0, 1]
            assert [message.value for message in topic.read()] == [b"a", b"b"]
            with topic.subscribe("billing", start="earliest") as sub:
                for value in (b"a", b"b"):
                    message = sub.receive(WAIT_SECONDS)
                    assert message is not None
                    assert message.value == value
                    sub.ack(message)
            with topic.subscribe("billing") as sub:
                assert sub.lag.messages == 0

    def test_async_names_take_token_and_authority(self, protected: Protected) -> None:
        """connect_async passes on what it is given."""

        async def work() -> bytes | None:
            log = await tidelog.connect_async(protected.url, token=protected.writer, tls_ca=protected.ca)
            try:
                topic: Any = await log.topic_async("shop/async")
                await topic.append_async(b"a", sync=True)
                sub = await topic.subscribe_async("billing", start="earliest")
                message = await sub.receive_async(WAIT_SECONDS)
                await sub.ack_async(message)
                await sub.close_async()
                value: bytes | None = message.value
                return value
            finally:
                await log.close_async()

        assert asyncio.run(work()) == b"a"

    def test_variables_stand_for_token_and_authority(
        self, protected: Protected, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Loss prevented: with TIDELOG_TOKEN set, opening a log in the same process said that it is not a setting."""
        monkeypatch.setenv("TIDELOG_TOKEN", protected.writer)
        monkeypatch.setenv("TIDELOG_TLS_CA", protected.ca)
        with tidelog.connect(protected.url) as log, tidelog.open(tmp_path / "own") as own:
            assert log.topic("shop/variables").append(b"a") == own.topic("a/b").append(b"a") == 0


class TestRefusals:
    @pytest.mark.parametrize("token", ["", WRONG])
    def test_missing_or_wrong_token_is_refused_when_connecting(self, protected: Protected, token: str) -> None:
        """The error says where tokens come from, and where they go; it never shows one."""
        with pytest.raises(tidelog.AccessDeniedError) as refused:
            tidelog.connect(protected.url, token=token, tls_ca=protected.ca)
        assert "tidelog auth token create" in (refused.value.hint or "")
        assert "TIDELOG_TOKEN" in (refused.value.hint or "")
        assert WRONG not in f"{refused.value!r} {refused.value} {refused.value.hint}"

    def test_missing_grant_names_the_command_that_gives_it(self, protected: Protected) -> None:
        """A reader can neither append nor, without a grant on the group, subscribe; reading works."""
        with protected.connect() as log:
            log.topic("shop/orders").append(b"a", sync=True)
        with protected.connect(protected.reader) as log:
            topic = log.topic("shop/orders")
            assert next(iter(topic.read())).value == b"a"
            with pytest.raises(tidelog.AccessDeniedError, match="write on topic:shop/orders") as refused:
                topic.append(b"b")
            assert "tidelog auth grant NAME write topic:shop/orders" in (refused.value.hint or "")
            with pytest.raises(tidelog.AccessDeniedError, match="group:billing"):
                topic.subscribe("billing")

    def test_unknown_authority_names_the_option(self, protected: Protected, tmp_path: Path) -> None:
        """A certificate that nobody vouches for is refused at once, before the token is sent."""
        for authority in (None, Authority(tmp_path / "others").path):
            with pytest.raises(tidelog.ConfigError, match="certificate") as refused:
                tidelog.connect(protected.url, token=protected.writer, tls_ca=authority)
            assert "tls_ca" in (refused.value.hint or "")

    def test_unusable_authority_is_an_error_with_its_path(self, protected: Protected, tmp_path: Path) -> None:
        """A file that is not there, one without a certificate, and two answers to one question."""
        empty = tmp_path / "empty.pem"
        empty.write_text("nothing")
        for path in (empty, tmp_path / "none.pem"):
            with pytest.raises(tidelog.ConfigError, match="authority") as refused:
                tidelog.connect(protected.url, tls_ca=path)
            assert refused.value.path == path
        with pytest.raises(tidelog.InputError, match="cannot be combined"):
            tidelog.connect(protected.url, tls_ca=protected.ca, tls=ssl.create_default_context())

    def test_plain_http_to_a_server_with_tls_says_https(self, protected: Protected) -> None:
        """A URL with the wrong scheme is a frequent mistake."""
        with pytest.raises(tidelog.ServerUnavailableError) as refused:
            tidelog.connect(protected.url.replace("https://", "http://"), token="")
        assert "https://" in (refused.value.hint or "")


class TestStore:
    def test_topic_is_shipped_verified_and_sealed(self, protected: Protected) -> None:
        """sync="shipped" returns when the store has the message; ship, verify and seal are done by the server."""
        with protected.connect() as log:
            topic = log.topic("shop/history")
            offset = topic.append(b"a", sync="shipped")
            assert topic.shipped_offset > offset
            topic.append(b"b", sync=True)
            assert topic.ship() == 2
            report = topic.verify()
            assert report.ok
            assert [message.value for message in topic.read()] == [b"a", b"b"]
            topic.seal()


class TestCommands:
    def test_commands_take_token_and_authority(self, protected: Protected, cli: Cli) -> None:
        """produce and consume through a server that wants both."""
        where = ["--server", protected.url, "--tls-ca", protected.ca, "--token", protected.writer]
        made = cli("produce", "shop/commands", "--json", *where, stdin=b"a\nb\n").json
        assert made["messages"] == 2
        assert cli("consume", "shop/commands", "-s", "billing", *where).out == b"a\nb\n"
        assert cli("topic", "ship", "shop/commands", "--json", *where).json[0]["shipped_offset"] == 2

    def test_variables_stand_for_the_options(
        self, protected: Protected, cli: Cli, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Loss prevented: every command refused TIDELOG_TOKEN as no setting."""
        monkeypatch.setenv("TIDELOG_TOKEN", protected.writer)
        monkeypatch.setenv("TIDELOG_TLS_CA", protected.ca)
        assert cli("produce", "shop/variables", "--server", protected.url, stdin=b"a\n").code == 0

    def test_engine_commands_take_token_and_authority(self, protected: Protected, cli: Cli) -> None:
        """An object is read by somebody with the grant, and nobody else learns that there is an engine."""
        with protected.connect() as log:
            log.engine("photos").apply(1, tidelog.CreateBucket("b"))
            log.engine("photos").apply(2, tidelog.PutObject("b", "cat", b"meow"))
        where = ["--server", protected.url, "--tls-ca", protected.ca]
        assert cli("engine", "get", "b", "cat", *where, "--token", protected.writer).out == b"meow"
        assert cli("engine", "gc", *where, "--token", protected.writer).code == 0
        refused = cli("engine", "gc", "--engine", "photos", *where, "--token", protected.reader)
        assert (refused.code, "auth grant NAME admin engine:photos`" in refused.err) == (2, True)
        unseen = cli("engine", "get", "b", "cat", *where, "--token", protected.reader)
        assert (unseen.code, "photos" in unseen.err) == (2, False)

    def test_refused_command_names_the_fix(self, protected: Protected, cli: Cli) -> None:
        """Exit code 2 for a missing authority, a wrong token and a missing grant; no command that cannot be pasted."""
        server = ["--server", protected.url]
        unknown = cli("topic", "list", *server)
        assert (unknown.code, "--tls-ca" in unknown.err) == (2, True)
        server += ["--tls-ca", protected.ca]
        wrong = cli("topic", "list", *server, "--token", WRONG)
        assert (wrong.code, "--token" in wrong.err, WRONG in wrong.err) == (2, True, False)
        refused = cli("topic", "create", "shop/none", *server, "--token", protected.reader)
        assert refused.code == 2
        assert "auth grant NAME admin topic:shop/none`" in refused.err
