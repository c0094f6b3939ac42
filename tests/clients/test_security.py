"""Unmodified clients of Kafka authenticate at `tidelog serve` in every way that it offers, over TLS."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from tests.clients.conftest import Service
from tests.service.auth.certificates import Authority, Files
from tests.service.auth.test_jwt import RSA, b64, number, sign
from tests.service.kafka.secured import change_accounts, grant

import tidelog
from tidelog.service.auth.accounts import adding_token, adding_user, granting, make_token, make_user

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from kafka import KafkaConsumer, KafkaProducer
    from kafka import TopicPartition as PythonPartition

TOPIC = "shop.orders"
PASSWORD = "PLANTED-PASSWORD-of-alice"
ISSUER, AUDIENCE = "https://issuer.example.org", "tidelog"
_WAIT_SECONDS = 120.0


class Protected(NamedTuple):
    """A server with TLS and authentication, and what its clients have."""

    service: Service
    authority: Authority
    alice: Files
    token: str

    @property
    def trust(self) -> dict[str, Any]:
        return {"bootstrap.servers": self.service.kafka, "ssl.ca.location": self.authority.path}

    def sasl(self, mechanism: str, name: str = "alice", password: str = PASSWORD) -> dict[str, Any]:
        named = {"sasl.username": name, "sasl.password": password}
        return {**self.trust, "security.protocol": "SASL_SSL", "sasl.mechanism": mechanism, **named}

    def certified(self, files: Files) -> dict[str, Any]:
        own = {"ssl.certificate.location": files.cert, "ssl.key.location": files.key}
        return {**self.trust, "security.protocol": "SSL", **own}


def command(*arguments: str, text: str = "") -> str:
    """What a command prints."""
    run = [sys.executable, "-m", "tidelog.cli.main", *arguments]
    done = subprocess.run(run, input=text, capture_output=True, text=True, check=False, timeout=_WAIT_SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def protected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Protected]:
    """One server for all tests here, with users, grants and a token."""
    root = tmp_path_factory.mktemp("security")
    directory, authority = str(root / "served"), Authority(root / "certificates")
    server = authority.signed("server", "server", "localhost")
    new, token = make_token("alice", 0)
    with tidelog.open(directory) as log:
        change_accounts(
            log,
            adding_user("alice", make_user(PASSWORD, 0)),
            adding_user("mallory", make_user("PLANTED-PASSWORD-of-mallory", 0)),
            adding_user("root", make_user("PLANTED-PASSWORD-of-root", 0)),
            granting(grant("root admin *")),
            adding_token(new.id, token),
            granting(*(grant(f"alice admin {pattern}") for pattern in ("topic:shop/*", "group:*", "transaction:*"))),
        )
    numbers = RSA.public_key().public_numbers()
    keys = root / "jwks.json"
    keys.write_text(json.dumps({"keys": [{"kty": "RSA", "n": number(numbers.n), "e": number(numbers.e)}]}))
    service = Service(
        Path(directory),
        *("--auth", "required", "--tls-cert", server.cert, "--tls-key", server.key, "--tls-client-ca", authority.path),
        *("--oauth-keys", str(keys), "--oauth-issuer", ISSUER, "--oauth-audience", AUDIENCE),
    )
    try:
        yield Protected(service.start(), authority, authority.signed("alice", "alice"), new.text)
    finally:
        service.close()


def jwt(subject: str = "alice", **claims: Any) -> tuple[str, float]:
    """A token of the issuer, and when it ends."""
    ends = time.time() + 3600
    body = {"iss": ISSUER, "aud": AUDIENCE, "sub": subject, "exp": ends, **claims}
    signed = f"{b64(json.dumps({'alg': 'RS256'}).encode())}.{b64(json.dumps(body).encode())}"
    return f"{signed}.{b64(sign('RS256', signed.encode()))}", ends


def round_trip(settings: dict[str, Any], value: bytes, group: str | None = None) -> None:
    """Produces a value and consumes it, as a member of a group if there is one, by librdkafka."""
    offsets: list[int | None] = []

    def delivered(error: object, message: Message) -> None:
        assert error is None, error
        offsets.append(message.offset())

    producer = Producer(settings)
    producer.produce(TOPIC, value, on_delivery=delivered)
    assert producer.flush(_WAIT_SECONDS) == 0
    (offset,) = offsets
    assert offset is not None
    start = {"auto.offset.reset": "earliest", "enable.auto.commit": False}
    consumer = Consumer({**settings, **start, "group.id": group or "none"})
    if group is None:
        consumer.assign([TopicPartition(TOPIC, 0, offset)])
    else:
        consumer.subscribe([TOPIC])
    deadline, found = time.monotonic() + _WAIT_SECONDS, list[bytes | None]()
    while value not in found and time.monotonic() < deadline:
        for message in consumer.consume(100, 0.5):
            assert message.error() is None, message.error()
            found.append(message.value())
    consumer.close()
    assert value in found


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_librdkafka_authenticates_with_a_password(protected: Protected, mechanism: str) -> None:
    """Over TLS, produces and consumes; once as a member of a group."""
    round_trip(protected.sasl(mechanism), mechanism.encode(), "a-group" if mechanism == "PLAIN" else None)


def test_librdkafka_authenticates_with_a_token(protected: Protected) -> None:
    """OAUTHBEARER with a signed JWT."""
    settings = {**protected.trust, "security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}
    round_trip({**settings, "oauth_cb": lambda config: jwt()}, b"token")


def test_librdkafka_authenticates_with_a_certificate(protected: Protected) -> None:
    """The subject of its certificate is who it is."""
    round_trip(protected.certified(protected.alice), b"certificate")


def connection_error(settings: dict[str, Any]) -> KafkaError:
    """Why a client does not get in, from its own log of errors."""
    seen: list[KafkaError] = []
    with_errors: dict[str, Any] = {**settings, "error_cb": seen.append}
    client = AdminClient(with_errors)
    wanted = (KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError._SSL)
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline:
        client.poll(0.2)
        for error in seen:
            if error.code() in wanted:
                return error
    raise AssertionError(f"no error of authentication: {seen}")


def test_librdkafka_is_told_why_it_is_refused(protected: Protected) -> None:
    """A wrong password, a forged token and a certificate of somebody else's authority are errors of authentication."""
    assert "Authentication failed" in str(connection_error(protected.sasl("PLAIN", password="wrong password")))
    connection_error(protected.sasl("SCRAM-SHA-512", password="wrong password"))
    forged = {**protected.trust, "security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}
    connection_error({**forged, "oauth_cb": lambda config: (jwt()[0][:-8] + "AAAAAAAA", time.time() + 3600)})


def test_librdkafka_is_refused_what_it_has_no_grant_for(protected: Protected) -> None:
    """Somebody who is known and may do nothing: Kafka's errors for topics and groups, and lists without anything."""
    settings = protected.sasl("SCRAM-SHA-256", "mallory", "PLANTED-PASSWORD-of-mallory")
    round_trip(protected.sasl("SCRAM-SHA-256"), b"before")
    assert AdminClient(settings).list_topics(timeout=_WAIT_SECONDS).topics == {}
    errors: list[KafkaError] = []
    producer = Producer(settings)
    producer.produce(TOPIC, b"x", on_delivery=lambda error, message: errors.append(error))  # type: ignore[arg-type]
    assert producer.flush(_WAIT_SECONDS) == 0
    assert [error.code() for error in errors] == [KafkaError.TOPIC_AUTHORIZATION_FAILED]
    consumer = Consumer({**settings, "group.id": "g"})
    consumer.subscribe([TOPIC])
    deadline, codes = time.monotonic() + _WAIT_SECONDS, set[int]()
    while KafkaError.GROUP_AUTHORIZATION_FAILED not in codes and time.monotonic() < deadline:
        found = consumer.poll(0.5)
        error = None if found is None else found.error()
        codes |= set() if error is None else {error.code()}
    consumer.close()
    assert KafkaError.GROUP_AUTHORIZATION_FAILED in codes


def test_admin_client_manages_users_and_rules(protected: Protected) -> None:
    """librdkafka's admin client adds a user of SCRAM, allows it to write, shows the rule and takes it back."""
    admin = AdminClient(protected.sasl("SCRAM-SHA-512", "root", "PLANTED-PASSWORD-of-root"))
    info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
    user = UserScramCredentialUpsertion("erin", info, b"PLANTED-PASSWORD-of-erin", b"a salt of 16 byt")
    for done in admin.alter_user_scram_credentials([user]).values():
        done.result(_WAIT_SECONDS)
    who, allow = ("User:erin", "*"), AclPermissionType.ALLOW
    rules = [
        AclBinding(ResourceType.TOPIC, "shop.", ResourcePatternType.PREFIXED, *who, AclOperation.ALL, allow),
        AclBinding(ResourceType.GROUP, "none", ResourcePatternType.LITERAL, *who, AclOperation.READ, allow),
    ]
    for created in admin.create_acls(rules).values():
        created.result(_WAIT_SECONDS)
    nothing: Any = None  # which its types do not know of
    everything = AclBindingFilter(
        *(ResourceType.ANY, nothing, ResourcePatternType.ANY, "User:erin", nothing),
        *(AclOperation.ANY, AclPermissionType.ANY),
    )
    assert admin.describe_acls(everything).result(_WAIT_SECONDS) == rules
    round_trip(protected.sasl("SCRAM-SHA-256", "erin", "PLANTED-PASSWORD-of-erin"), b"erin")
    (deleted,) = admin.delete_acls([everything]).values()
    assert sorted(map(str, deleted.result(_WAIT_SECONDS))) == sorted(map(str, rules))
    assert admin.describe_acls(everything).result(_WAIT_SECONDS) == []


def test_kafka_python_authenticates_with_scram(protected: Protected) -> None:
    """SCRAM-SHA-512 over TLS."""
    settings = {
        "bootstrap_servers": protected.service.kafka,
        "security_protocol": "SASL_SSL",
        "ssl_cafile": protected.authority.path,
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_plain_username": "alice",
        "sasl_plain_password": PASSWORD,
    }
    producer = KafkaProducer(**settings)
    offset = producer.send(TOPIC, b"kafka-python").get(_WAIT_SECONDS).offset
    producer.close()
    consumer = KafkaConsumer(**settings, consumer_timeout_ms=int(_WAIT_SECONDS * 1000))
    consumer.assign([PythonPartition(TOPIC, 0)])
    consumer.seek(PythonPartition(TOPIC, 0), offset)
    assert next(consumer).value == b"kafka-python"
    consumer.close()


def test_aiokafka_authenticates_with_plain(protected: Protected) -> None:
    """PLAIN over TLS."""
    context = ssl.create_default_context(cafile=protected.authority.path)
    settings = {
        "bootstrap_servers": protected.service.kafka,
        "security_protocol": "SASL_SSL",
        "ssl_context": context,
        "sasl_mechanism": "PLAIN",
        "sasl_plain_username": "alice",
        "sasl_plain_password": PASSWORD,
    }

    async def run() -> None:
        async with AIOKafkaProducer(**settings) as producer:
            sent = await producer.send_and_wait(TOPIC, b"aiokafka")
        consumer = AIOKafkaConsumer(TOPIC, **settings, group_id="aiokafka", auto_offset_reset="earliest")
        async with consumer, asyncio.timeout(_WAIT_SECONDS):
            while (await consumer.getone()).offset != sent.offset:
                pass

    asyncio.run(run())


def get(protected: Protected, path: str, token: str | None, own: Files | None = None) -> tuple[int, bytes]:
    """Status and body of a request over TLS."""
    context = ssl.create_default_context(cafile=protected.authority.path)
    if own is not None:
        context.load_cert_chain(*own)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(protected.service.http + path, headers=headers)
    try:
        with urllib.request.urlopen(request, context=context, timeout=_WAIT_SECONDS) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_http_takes_tokens_and_certificates(protected: Protected) -> None:
    """The same users by a token of ours, by a JWT and by a certificate; nobody without one."""
    round_trip(protected.sasl("SCRAM-SHA-256"), b"http")
    assert protected.service.http.startswith("https://")
    for token, own in ((protected.token, None), (jwt()[0], None), (None, protected.alice)):
        status, body = get(protected, "/v1/topics", token, own)
        assert status == 200
        assert b"shop/orders" in body
    assert get(protected, "/v1/topics", None)[0] == 401
    assert get(protected, "/v1/topics", protected.token + "x")[0] == 401
    status, body = get(protected, "/v1/topics", jwt("mallory")[0])
    assert (status, b"shop" in body) == (200, False)


def test_no_secret_is_in_any_output(protected: Protected) -> None:
    """After all of that, neither passwords nor tokens are in what the server has logged, or on its disk in clear."""
    token, _ = jwt()
    get(protected, f"/v1/topics?token={token}&password={PASSWORD}", token)
    get(protected, f"/nowhere/{protected.token}", protected.token + "x")
    connection_error(protected.sasl("PLAIN", password="PLANTED-WRONG-PASSWORD"))
    said = protected.service.said
    assert "event=authentication" in said
    secrets = ["PLANTED", protected.token.split("_", 2)[2], *(part for part in token.split(".")[1:])]
    assert [secret for secret in secrets if secret in said] == []
    for path in protected.service.directory.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert b"PLANTED" not in data, path
            assert secrets[1].encode() not in data, path


def test_sighup_makes_changes_count(protected: Protected) -> None:
    """A user that was added beside the server connects after SIGHUP, and is gone after the next one."""
    directory = str(protected.service.directory)
    command("auth", "user", "add", "dave", "--dir", directory, text="password of dave\n")
    command("auth", "grant", "dave", "admin", "topic:shop/*", "--dir", directory)
    command("auth", "grant", "dave", "admin", "group:*", "--dir", directory)
    reload(protected.service)
    settings = protected.sasl("SCRAM-SHA-256", "dave", "password of dave")
    round_trip(settings, b"dave")
    command("auth", "user", "remove", "dave", "--yes", "--dir", directory)
    reload(protected.service)
    connection_error(settings)


def reload(service: Service) -> None:
    """Sends SIGHUP, and waits until the server has done what it asks for."""
    reloaded = "event=security_reloaded"
    before, deadline = service.said.count(reloaded), time.monotonic() + _WAIT_SECONDS
    os.kill(service.pid, signal.SIGHUP)
    while service.said.count(reloaded) == before:
        assert time.monotonic() < deadline, "it was not reloaded"
        time.sleep(0.02)
