"""etcd as people run it: several members of which one dies, TLS with certificates of clients, users with passwords."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from tests.fault_proxy import LOSE_ANSWER, FaultProxy
from tests.servers import EtcdCluster, EtcdServer

import tidelog
from tidelog.errors import AccessDeniedError, ConfigError, ConflictError, LeaseLostError
from tidelog.secret import Secret
from tidelog.store.metadata import Check, Put
from tidelog.store.metadata.etcd import EtcdMetadataStore
from tidelog.store.metadata.etcd_client import Endpoint
from tidelog.store.metadata.open import open_metadata_store
from tidelog.store.settings import MetadataSettings

PASSWORD = "open-sesame-7"
USER = MetadataSettings(etcd_user="app", etcd_password=Secret(PASSWORD))


def prefix() -> str:
    """One that no other test uses."""
    return f"test-{secrets.token_hex(8)}/"


def behind(proxy: FaultProxy) -> Endpoint:
    parts = urlsplit(proxy.endpoint)
    assert parts.hostname is not None
    assert parts.port is not None
    return Endpoint(parts.hostname, parts.port)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    started = EtcdCluster(tmp_path_factory.mktemp("cluster"))
    try:
        started.start()
        yield started
    finally:
        started.kill()


class TestOneOfTwoEndpoints:
    """A way to the cluster that misbehaves, and one that does not."""

    def test_write_whose_answer_was_lost_is_found_through_another_member(self, etcd_server: EtcdServer) -> None:
        """Done once: it is neither made again nor reported as a conflict with itself."""
        at = prefix()
        with (
            FaultProxy(f"http://{etcd_server.endpoint}") as proxy,
            EtcdMetadataStore([behind(proxy), etcd_server.endpoint]) as store,
        ):
            before = store.change_mark()
            proxy.misbehave(LOSE_ANSWER)
            versions = store.commit([Check(at + "a", None)], [Put(at + "a", b"mine")])
            assert proxy.met == {LOSE_ANSWER: 1}
            assert store.get(at + "a") == (at + "a", b"mine", versions[at + "a"])
            assert versions[at + "a"] == str(int(str(before)) + 1)
            with pytest.raises(ConflictError):
                store.commit([Check(at + "a", None)], [Put(at + "a", b"other")])

    def test_lease_is_renewed_through_another_member(self, etcd_server: EtcdServer) -> None:
        """It is the cluster's, not the member's."""
        with (
            FaultProxy(f"http://{etcd_server.endpoint}") as proxy,
            EtcdMetadataStore([behind(proxy), etcd_server.endpoint]) as store,
        ):
            lease = store.lease(120)
            proxy.misbehave(LOSE_ANSWER)
            lease.refresh()
            lease.revoke()
            assert proxy.met == {LOSE_ANSWER: 1}  # who did not answer is not asked first again
            with pytest.raises(LeaseLostError):
                store.commit([], [Put(prefix() + "a", b"x", lease)])

    def test_members_of_two_clusters_are_refused(self, etcd_server: EtcdServer, cluster: EtcdCluster) -> None:
        """Loss prevented: one name for two catalogs, of which each has half."""
        with (
            FaultProxy(f"http://{etcd_server.endpoint}") as proxy,
            EtcdMetadataStore([behind(proxy), *cluster.endpoints]) as store,
        ):
            assert store.get("app/a") is None
            proxy.misbehave(LOSE_ANSWER)
            with pytest.raises(ConfigError, match="another etcd cluster"):
                store.get("app/a")


def test_proxies_of_the_environment_are_not_asked(etcd_server: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster is reached directly; to look for them is paid with every request."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with EtcdMetadataStore([etcd_server.endpoint]) as store:
        assert store.get(prefix() + "a") is None


def test_two_installations_in_one_cluster_need_roots_of_their_own(etcd_server: EtcdServer, tmp_path: Path) -> None:
    """Loss prevented: the second one with the same root fenced the first and mixed their catalogs."""
    stores, metadata = [f"file://{tmp_path / name}" for name in ("one", "two")], etcd_server.url
    root = prefix().rstrip("/")
    with tidelog.open(tmp_path / "a", store=stores[0], metadata=metadata, metadata_root=root) as log:
        topic = log.topic("shop/orders")
        with pytest.raises(ConfigError, match=f"metadata_root {root} in {etcd_server.url} belongs to {stores[0]}"):
            tidelog.open(tmp_path / "b", store=stores[1], metadata=metadata, metadata_root=root)
        assert topic.append(b"mine", sync="shipped") == 0
    with tidelog.open(tmp_path / "c", store=stores[0], metadata=metadata, metadata_root=root) as log:
        assert [message.value for message in log.topic("shop/orders").read()] == [b"mine"]


# Three members


def leader_first(cluster: EtcdCluster) -> list[EtcdServer]:
    """Its members, the leader in front."""

    def is_leader(member: EtcdServer) -> bool:
        with EtcdMetadataStore([member.endpoint]) as store:
            said = store._client.ask("maintenance/status", {})
            return bool(said["leader"] == said["header"]["member_id"])

    return sorted(cluster.members, key=is_leader, reverse=True)


def test_cluster_goes_on_when_its_leader_is_killed(cluster: EtcdCluster) -> None:
    """Writes, reads and leases, through a member that is left; what was written before is there."""
    at, members = prefix(), leader_first(cluster)
    with EtcdMetadataStore([member.endpoint for member in members], timeout_seconds=3) as store:
        lease = store.lease(60)
        first = store.commit([], [Put(at + "a", b"1"), Put(at + "leased", b"x", lease)])[at + "a"]
        members[0].kill()
        second = store.commit([Check(at + "a", first)], [Put(at + "a", b"2")])[at + "a"]
        lease.refresh()
        assert [(entry.key, entry.value) for entry in store.range(at)] == [(at + "a", b"2"), (at + "leased", b"x")]
        with pytest.raises(ConflictError):
            store.commit([Check(at + "a", first)], [Put(at + "a", b"3")])
        members[0].start()
        assert int(second) > int(first)


@pytest.mark.long
def test_topic_goes_on_while_members_die_in_turn(cluster: EtcdCluster, tmp_path: Path) -> None:
    """Every member is killed once and comes back; the owner keeps its topic, and ships each message once."""
    url = "etcd://" + ",".join(map(str, cluster.endpoints))
    place: dict[str, Any] = {"store": f"file://{tmp_path / 'store'}", "metadata": url, "metadata_root": tmp_path.name}
    with tidelog.open(tmp_path / "log", lease_seconds=30, ship_retry_max_seconds=0.2, **place) as log:
        topic = log.topic("shop/orders")
        for member in cluster.members:
            topic.append(member.member.encode(), sync=True)
            member.kill()
            assert topic.append(b"without", sync="shipped") == topic.next_offset - 1
            member.start()
    with tidelog.open(tmp_path / "other", **place) as log:
        found = [message.value for message in log.topic("shop/orders").read(stop=6)]
        assert found == [b"m1", b"without", b"m2", b"without", b"m3", b"without"]


# TLS


class Certificates(NamedTuple):
    """Files: a CA, a server's certificate, a client's."""

    directory: Path

    def path(self, name: str) -> str:
        return str(self.directory / name)

    def make(self) -> None:
        """All of them are good for today."""
        ec = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        self._openssl(
            *("req", "-x509", *ec, "-subj", "/CN=test-ca", "-days", "1", "-keyout", "ca.key", "-out", "ca.pem")
        )
        (self.directory / "names").write_text("subjectAltName=IP:127.0.0.1\n")
        for name in ("server", "client"):
            # The gateway of etcd is a client of its own server, with the same certificate.
            self._openssl("req", *ec, "-subj", f"/O=tidelog-{name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
            self._openssl(
                *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
                *("-days", "1", "-extfile", "names", "-out", f"{name}.pem"),
            )

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.directory, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    assert shutil.which("openssl") is not None, "openssl is not installed; certificates are made with it"
    made = Certificates(tmp_path_factory.mktemp("certificates"))
    made.make()
    return made


@pytest.fixture(scope="module")
def secure(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One that speaks TLS, to clients with a certificate alone."""
    options = (
        f"--cert-file={certificates.path('server.pem')}",
        f"--key-file={certificates.path('server.key')}",
        f"--trusted-ca-file={certificates.path('ca.pem')}",
        "--client-cert-auth",
    )
    server = EtcdServer(tmp_path_factory.mktemp("secure"), scheme="https", options=options)
    server.begin()
    yield server
    server.kill()


def test_tls_with_certificates_of_clients(secure: EtcdServer, certificates: Certificates, tmp_path: Path) -> None:
    """A whole installation; and what is said where a certificate is missing or not trusted."""
    ca: dict[str, Any] = {"etcd_ca_path": certificates.path("ca.pem")}
    both = ca | {"etcd_cert_path": certificates.path("client.pem"), "etcd_key_path": certificates.path("client.key")}
    place: dict[str, Any] = {"store": f"file://{tmp_path / 'store'}", "metadata": secure.url}
    with tidelog.open(tmp_path / "log", **place, **both) as log:
        log.topic("shop/orders").append(b"sealed", sync="shipped")
    with tidelog.open(tmp_path / "other", **place, **both) as log:
        assert [message.value for message in log.topic("shop/orders").read()] == [b"sealed"]
    for settings, error, fix in (
        (MetadataSettings(), ConfigError, "etcd_ca_path"),
        (MetadataSettings(**ca), AccessDeniedError, "etcd_cert_path"),
    ):
        with open_metadata_store(secure.url, settings=settings) as store, pytest.raises(error, match=fix):
            store.get("tidelog/a")


@pytest.mark.parametrize(
    ("url", "settings", "problem"),
    [
        ("etcd://h", MetadataSettings(etcd_ca_path="/dev/null"), "etcds://"),
        ("etcds://h", MetadataSettings(etcd_ca_path="/nowhere/ca.pem"), "etcd_ca_path cannot be read"),
        ("etcds://h", MetadataSettings(etcd_cert_path="/dev/null"), "together"),
        ("etcd://h", MetadataSettings(etcd_user="app"), "together"),
        ("bucket", USER, "etcd_user is for etcd"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(url: str, settings: MetadataSettings, problem: str) -> None:
    """Before anything is asked."""
    with pytest.raises(ConfigError, match=problem):
        open_metadata_store(url, settings=settings)


# Users


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One with authentication: the user `app` reaches the keys below `app/` and no others."""
    server = EtcdServer(tmp_path_factory.mktemp("users"), options=("--bcrypt-cost=4",))
    server.begin()
    with EtcdMetadataStore([server.endpoint]) as store:
        ask = store._client.ask
        for user, password in (("root", "root"), ("app", PASSWORD)):
            ask("auth/user/add", {"name": user, "password": password})
            ask("auth/role/add", {"name": user})
            ask("auth/user/grant", {"user": user, "role": user})
        below = {"key": "YXBwLw==", "range_end": "YXBwMA==", "permType": "READWRITE"}  # app/ to app0
        ask("auth/role/grant", {"name": "app", "perm": below})
        ask("auth/enable", {})
    yield server
    server.kill()


def test_user_with_a_password_and_a_prefix_of_its_own(users: EtcdServer, tmp_path: Path) -> None:
    """A whole installation below one prefix; after a restart the server knows no token, and a new one is fetched."""
    place: dict[str, Any] = {"metadata": users.url, "metadata_root": "app", "ownership_check_seconds": 0.05}
    user: dict[str, Any] = {"etcd_user": "app", "etcd_password": PASSWORD}
    with tidelog.open(tmp_path / "log", store=f"file://{tmp_path / 'store'}", **place, **user) as log:
        topic = log.topic("shop/orders")
        topic.append(b"before", sync="shipped")
        users.kill()
        users.start()
        topic.append(b"after", sync="shipped")
        assert PASSWORD not in (tmp_path / "log" / "tidelog.json").read_text()
        assert [message.offset for message in topic.read(stop=2)] == [0, 1]


def test_token_that_is_not_known_is_replaced(users: EtcdServer) -> None:
    """For reads, writes and leases; what was refused was not done."""
    with EtcdMetadataStore([users.endpoint], USER) as store:
        store._client._token = "gone.1"
        assert store.get("app/none") is None
        store._client._token = "gone.2"
        version = store.commit([Check("app/once", None)], [Put("app/once", b"x")])["app/once"]
        store._client._token = "gone.3"
        lease = store.lease(30)
        store._client._token = "gone.4"
        lease.refresh()
        store.remove("app/once", version)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (MetadataSettings(), "app/a"),
        (MetadataSettings(etcd_user="app", etcd_password=Secret(PASSWORD + "!")), "app/a"),
        (USER, "tidelog/a"),
    ],
)
def test_wrong_user_is_told_so_without_the_password(users: EtcdServer, settings: MetadataSettings, key: str) -> None:
    """No user, a wrong password, a key that is not below its prefix."""
    with EtcdMetadataStore([users.endpoint], settings) as store:
        with pytest.raises(AccessDeniedError, match="etcd_user") as denied:
            store.get(key)
        assert PASSWORD not in f"{denied.value!r} {denied.value} {store!r} {settings!r}"


def test_user_where_there_are_none_is_refused(etcd_server: EtcdServer) -> None:
    """Nobody believes that a password protects what it does not."""
    with EtcdMetadataStore([etcd_server.endpoint], USER) as store, pytest.raises(ConfigError, match="Leave etcd_user"):
        store.get("app/a")
