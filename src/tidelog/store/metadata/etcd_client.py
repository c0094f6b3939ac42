"""The client of an etcd cluster: its members, TLS, authentication, and failover when a member does not answer.

Invariants
- An idempotent request goes from member to member until one answers. A transaction that writes goes to one member:
  without an answer it is undecided, and the caller reads back, at the next member by then, before it is retried
  (`base.py`).
- A request refused because of its token was not done: it is retried with a new token, once. Tokens expire, and a
  restarted member knows none.
- All answers are of one cluster. Members of two clusters would be two catalogs under one name.
- The password is in the body of one request and nowhere else.
- Proxies, netrc and certificates in the environment are ignored: a cluster is reached directly.
- Requests are plain HTTP to etcd's own gateway, over connections that are kept (`urllib3`): a node makes many, and what
  a general client adds to each costs three times as much as the request.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import certifi
import msgspec
import urllib3
from urllib3.exceptions import ClosedPoolError, HTTPError, ReadTimeoutError

from tidelog.errors import (
    AccessDeniedError,
    ClosedError,
    ConfigError,
    DataError,
    InputError,
    LeaseLostError,
    StoreUnavailableError,
    TidelogError,
)
from tidelog.store.settings import MetadataSettings

_CONNECT_SECONDS = 2.0  # a machine that is gone says nothing, and others are asked after it
_API_PATH = "/v3/"
_KEPT_CONNECTIONS = 32
_SHOWN_CHARACTERS = 200
_OK = 200
# Codes of gRPC, which etcd puts into its errors.
_INVALID, _NOT_FOUND, _DENIED, _NOT_NOW, _UNAUTHENTICATED = 3, 5, 7, 9, 16
_NEEDS_USER = "Set etcd_user and etcd_password, to a user whose role reaches the keys below metadata_root"
_NEEDS_CERTIFICATE = "Set etcd_cert_path and etcd_key_path, to a certificate that the cluster's CA has signed"
_NEEDS_CA = "Set etcd_ca_path to the certificate of the CA that signed those of the members; each names its host"


class Endpoint(NamedTuple):
    """Where a member listens for clients."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class _TokenError(AccessDeniedError):
    """The token is not known, or no longer: nothing was done."""


class EtcdClient:
    """A cluster, by its members. Nothing is asked until it is needed; threads may share it."""

    def __init__(
        self, endpoints: Sequence[Endpoint], settings: MetadataSettings, *, is_tls: bool, timeout_seconds: float
    ) -> None:
        self.url = f"{'etcds' if is_tls else 'etcd'}://{','.join(map(str, endpoints))}"
        self._settings = settings
        self._patience = urllib3.Timeout(connect=min(_CONNECT_SECONDS, timeout_seconds), read=timeout_seconds)
        _refuse_what_does_not_go_together(settings, is_tls=is_tls)
        self._members = [_connections(one, settings, is_tls=is_tls) for one in endpoints]
        self._urls = [f"{'https' if is_tls else 'http'}://{one}" for one in endpoints]
        self._current = 0
        self._guard = Lock()
        self._token: str | None = None
        self._cluster: str | None = None
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True
        for member in self._members:
            member.close()  # what is under way closes its connection when it ends

    def ask(self, path: str, question: Mapping[str, Any], *, is_write: bool = False) -> dict[str, Any]:
        """The answer of a member that has one. `is_write`: it goes to one member, and is not made again here."""
        unanswered: StoreUnavailableError | None = None
        for _ in self._members[:1] if is_write else self._members:
            at = self._current
            try:
                return self._ask_member(at, path, question)
            except StoreUnavailableError as error:
                unanswered = error
                if self._current == at:  # else another thread was faster
                    self._current = (at + 1) % len(self._members)
        assert unanswered is not None
        raise unanswered

    def _ask_member(self, at: int, path: str, question: Mapping[str, Any]) -> dict[str, Any]:
        token = self._known_token(at)
        try:
            answer = self._post(at, path, question, token)
        except _TokenError:
            if token is None:
                raise
            self._forget(token)
            answer = self._post(at, path, question, self._known_token(at))
        self._refuse_other_cluster(at, answer)
        return answer

    def stream(self, path: str, question: Mapping[str, Any], idle_seconds: float) -> Iterator[dict[str, Any]]:
        """The answers of one member, as they come; it ends when there was none for so long.

        The member is the one that has answered last; StoreUnavailableError leaves it for the next one.
        """
        at = self._current
        token = self._known_token(at)
        try:
            with _explained(self._urls[at], path):
                yield from self._lines(at, path, question, token, idle_seconds)
        except _TokenError:
            if token is None:
                raise
            self._forget(token)
        except StoreUnavailableError:
            if self._current == at:
                self._current = (at + 1) % len(self._members)
            raise

    def _lines(
        self, at: int, path: str, question: Mapping[str, Any], token: str | None, idle_seconds: float
    ) -> Iterator[dict[str, Any]]:
        patience = urllib3.Timeout(connect=min(_CONNECT_SECONDS, idle_seconds), read=idle_seconds)
        url = self._urls[at]
        answer = self._send(at, path, question, token, patience, is_stream=True)
        try:
            if answer.status != _OK:
                raise _translate(answer.data.decode("utf-8", "replace"), url, "watch")
            try:
                for line in _whole_lines(answer.stream()):
                    said: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
                    if isinstance(said.get("error"), dict):
                        raise _translate(line.decode("utf-8", "replace"), url, "watch")
                    yield said
            except ReadTimeoutError:
                return
            except msgspec.MsgspecError as error:
                raise DataError(f"{url}: an answer that etcd does not give") from error
        finally:
            answer.close()  # the rest of it is not waited for
            answer.release_conn()

    # Users

    def _known_token(self, at: int) -> str | None:
        """None where there is no user."""
        user, password = self._settings.etcd_user, self._settings.etcd_password
        if user is None or password is None:
            return None
        with self._guard:
            if self._token is None:
                said = self._post(at, "auth/authenticate", {"name": user, "password": password.reveal()}, None)
                self._token = str(said.get("token", ""))
            return self._token

    def _forget(self, token: str) -> None:
        with self._guard:
            if self._token == token:  # else another thread has a new one already
                self._token = None

    # Requests

    def _post(self, at: int, path: str, question: Mapping[str, Any], token: str | None) -> dict[str, Any]:
        url = self._urls[at]
        with _explained(url, path):
            answer = self._send(at, path, question, token, self._patience)
            if answer.status != _OK:
                raise _translate(answer.data.decode("utf-8", "replace"), url, path)
            said = msgspec.json.decode(answer.data)
        if not isinstance(said, dict):
            raise DataError(f"{url}: an answer that etcd does not give")
        if isinstance(said.get("error"), dict):  # what fails in a stream fails behind a status that says OK
            raise _translate(answer.data.decode(), url, path)
        return said

    def _send(
        self,
        at: int,
        path: str,
        question: Mapping[str, Any],
        token: str | None,
        patience: urllib3.Timeout,
        *,
        is_stream: bool = False,
    ) -> urllib3.BaseHTTPResponse:
        if self._is_closed:
            raise ClosedError(f"{self.url} is closed")
        headers = {"Content-Type": "application/json"}
        if token is not None:
            headers["Authorization"] = token
        return self._members[at].urlopen(
            *("POST", _API_PATH + path, msgspec.json.encode(question), headers),
            retries=False,
            redirect=False,
            timeout=patience,
            preload_content=not is_stream,
        )

    def _refuse_other_cluster(self, at: int, answer: dict[str, Any]) -> None:
        header = answer.get("header") or answer.get("result", {}).get("header") or {}
        cluster = header.get("cluster_id")
        if self._cluster is None:
            self._cluster = cluster
        if cluster is not None and cluster != self._cluster:
            raise ConfigError(
                f"{self._urls[at]} is a member of another etcd cluster than others of {self.url}",
                hint="Name the members of one cluster",
            )


def _whole_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from filter(None, map(bytes.strip, lines))


def _connections(endpoint: Endpoint, settings: MetadataSettings, *, is_tls: bool) -> urllib3.HTTPConnectionPool:
    """The connections to one member. None is made until it is needed."""
    if not is_tls:
        return urllib3.HTTPConnectionPool(endpoint.host, endpoint.port, maxsize=_KEPT_CONNECTIONS)
    return urllib3.HTTPSConnectionPool(
        endpoint.host,
        endpoint.port,
        maxsize=_KEPT_CONNECTIONS,
        cert_reqs="CERT_REQUIRED",
        ca_certs=settings.etcd_ca_path or certifi.where(),
        cert_file=settings.etcd_cert_path,
        key_file=settings.etcd_key_path,
    )


def _refuse_what_does_not_go_together(settings: MetadataSettings, *, is_tls: bool) -> None:
    for one, other in (("etcd_user", "etcd_password"), ("etcd_cert_path", "etcd_key_path")):
        if (getattr(settings, one) is None) != (getattr(settings, other) is None):
            raise ConfigError(f"{one} and {other} are needed together")
    for name in ("etcd_ca_path", "etcd_cert_path", "etcd_key_path"):
        path = getattr(settings, name)
        if path is None:
            continue
        if not is_tls:
            raise ConfigError(f"{name} is for TLS, and etcd:// has none", hint="Write etcds://host:2379")
        try:
            with Path(path).open("rb"):
                pass
        except OSError as error:
            raise ConfigError(f"{name} cannot be read: {error.strerror}", path=path) from error


@contextlib.contextmanager
def _explained(url: str, operation: str) -> Iterator[None]:
    """Turns what the client says into an error of ours that says what to do."""
    try:
        yield
    except TidelogError:
        raise
    except ClosedPoolError as error:
        raise ClosedError(f"{url} was closed during this request", operation=operation) from error
    except HTTPError as error:
        raise _translate(str(error), url, operation) from error
    except (msgspec.MsgspecError, OSError, ValueError) as error:
        raise StoreUnavailableError(f"{url} does not answer ({type(error).__name__})", operation=operation) from error


def _translate(text: str, url: str, operation: str) -> TidelogError:
    code, said = _code_and_message(text)
    refusal = _refusal(code, said, url, operation)
    if refusal is not None:
        return refusal
    if code == _NOT_FOUND and "lease" in said:
        return LeaseLostError("the lease ran out", operation=operation, hint="Take a new one")
    if code == _INVALID:
        return InputError(f"{url} refused the request ({said})", operation=operation)
    return _untrusted(text, url, operation) or StoreUnavailableError(
        f"{url} is not available ({said})", operation=operation
    )


def _refusal(code: int | None, said: str, url: str, operation: str) -> TidelogError | None:
    """Where it is the user, or the lack of one, that etcd does not accept."""
    if code == _UNAUTHENTICATED or (code == _INVALID and "auth store is old" in said):
        return _TokenError(f"{url}: access is denied ({said})", operation=operation)
    if code == _DENIED or (code == _INVALID and ("authentication failed" in said or "user name is empty" in said)):
        return AccessDeniedError(f"{url}: access is denied ({said})", operation=operation, hint=_NEEDS_USER)
    if code == _NOT_NOW and "authentication is not enabled" in said:
        hint = "Leave etcd_user and etcd_password out, or enable authentication in etcd"
        return ConfigError(f"{url} has no users ({said})", operation=operation, hint=hint)
    return None


def _untrusted(text: str, url: str, operation: str) -> TidelogError | None:
    """Where one side does not accept the certificate of the other: it will not do so later either."""
    if "CERTIFICATE_VERIFY_FAILED" in text:
        _, _, reason = text.partition("certificate verify failed: ")
        shown = reason.partition("(_ssl.c")[0].strip() or "it was signed by somebody else"
        return ConfigError(f"the certificate of {url} is not trusted: {shown}", operation=operation, hint=_NEEDS_CA)
    if "certificate required" in text or "bad certificate" in text:
        return AccessDeniedError(
            f"{url} asks for the certificate of a client", operation=operation, hint=_NEEDS_CERTIFICATE
        )
    return None


def _code_and_message(text: str) -> tuple[int | None, str]:
    try:
        said = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError:
        return None, text[:_SHOWN_CHARACTERS]
    if isinstance(said.get("error"), dict):
        said = {"code": said["error"].get("grpc_code"), **said["error"]}
    code = said.get("code")
    return code if isinstance(code, int) else None, str(said.get("message", ""))[:_SHOWN_CHARACTERS]
