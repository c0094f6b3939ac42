"""Opens an object store from a URL and settings.

    s3://bucket/prefix    gs://bucket/prefix    az://container/prefix    file:///directory    memory://

Invariants
- Every setting given is used, or refused with its name and the kind of store.
- Settings win over the environment, and credentials are never mixed: with a key from the settings no token is taken
  from the environment. A store with settings of its own (`replica_stores`) takes nothing from those of the others, and
  neither endpoint nor region from the environment, which are the first store's.
- What an s3:// store takes from the AWS_* variables is resolved once: pickled and opened elsewhere, it reaches the same
  location with the same key. (What it discovers itself, a role of the machine, it discovers there again.)
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from tidelog.errors import ConfigError, NotFoundError
from tidelog.files import LocalFiles, explained
from tidelog.secret import Secret
from tidelog.store.keys import check_key
from tidelog.store.object_store import ObjectStore
from tidelog.store.obstore import ObstoreStore, Reopen
from tidelog.store.settings import (
    DEFAULT_CONNECT_TIMEOUT_MS,
    DEFAULT_MAX_RETRIES,
    DEFAULT_REQUEST_TIMEOUT_MS,
    DEFAULT_RETRY_TIMEOUT_SECONDS,
    StoreSettings,
)
from tidelog.store.shared_directory import DirectoryStore

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, GCSConfig, RetryConfig, S3Config, S3Credential

_FETCH_SETTINGS = frozenset({"store_fetch_bytes", "store_fetch_ahead"})
_HTTP_SETTINGS = _FETCH_SETTINGS | frozenset(
    {
        "store_endpoint",
        "store_allow_http",
        "store_connect_timeout_ms",
        "store_request_timeout_ms",
        "store_part_bytes",
        "store_parts_in_flight",
        "store_max_retries",
        "store_retry_timeout_seconds",
    }
)
_FORMS = "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, file:///directory or memory://"
_TRUE = ("true", "1", "yes", "on")
# The first variable that is set and not empty counts.
_AWS_VARIABLES = {
    "store_endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "store_region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
}


class _Place(NamedTuple):
    """A URL taken apart. `host` is a bucket or container, `path` a prefix or a directory."""

    scheme: str
    host: str
    path: str
    url: str


class _Kind(NamedTuple):
    settings: frozenset[str]
    open: Callable[[_Place, StoreSettings], ObjectStore]


class _Keys:
    """Static credentials, as obstore asks for them. Given so, the environment's own are left alone."""

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings

    def __call__(self) -> S3Credential:
        given = self._settings
        assert given.store_access_key_id is not None
        assert given.store_secret_access_key is not None
        return {
            "access_key_id": given.store_access_key_id,
            "secret_access_key": given.store_secret_access_key.reveal(),
            "token": None if given.store_session_token is None else given.store_session_token.reveal(),
            "expires_at": None,
        }


def open_store(
    url: str, settings: StoreSettings | None = None, environment: Mapping[str, str] | None = None
) -> ObjectStore:
    """The store at this URL. Makes no request yet, except that the directory of a file:// URL is created.

    `environment` defaults to that of the process; only s3:// stores read it.
    """
    given = settings or StoreSettings()
    place = _parse(url)
    own = _own_settings(place, given)
    given = msgspec.structs.replace(own or given, replica_stores=None)
    _refuse_what_means_nothing(place, given)
    if place.scheme == "s3":
        known = os.environ if environment is None else environment
        given = _with_environment(given, known, {} if own is not None else _AWS_VARIABLES)
    _refuse_plain_http(place, given)
    try:
        store = _KINDS[place.scheme].open(place, given)
    except BaseError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"the store {place.url} cannot be opened: {reason}") from None
    store.settings = given
    return store


def settings_beside(first: str, url: str, settings: StoreSettings) -> StoreSettings:
    """Where `settings` are about the store `first`: those by which the one at `url` is opened beside it. One of another
    kind takes none of them but its own in `replica_stores`."""
    place = _parse(url)
    if place.scheme == _parse(first).scheme or _own_settings(place, settings) is not None:
        return settings
    own = {**(settings.replica_stores or {}), place.url: StoreSettings()}
    return msgspec.structs.replace(settings, replica_stores=own)


def require_store_directory(url: str) -> None:
    """NotFoundError where the directory of a file:// URL is missing.

    Opening such a store creates its directory. Who only reads asks first: a mistyped name would be an empty store.
    """
    if not is_store_directory(url):
        raise NotFoundError(
            "there is no such directory", path=Path(_parse(url).path), operation="open store", hint="Check the path"
        )


def is_store_directory(url: str) -> bool:
    """False where the directory of a file:// URL is missing. Of other stores nothing is asked."""
    return not url.startswith("file:") or os.path.isdir(_parse(url).path)


def canonical_url(url: str) -> str:
    """The canonical spelling of a store's URL; ConfigError when it is not one."""
    return _parse(url).url


def check_replicas(store: str, replicas: Iterable[str]) -> None:
    """ConfigError where a store is named as its own replica: it would be a copy of nothing."""
    for replica in replicas:
        if _location(replica) == _location(store) != "memory://":
            raise ConfigError(
                f"replicas names {replica}, which is the store itself",
                hint="Name another bucket or prefix, in another region if it is to survive the loss of this one",
            )


def _location(url: str) -> str:
    """The same for all URLs of a store, links followed."""
    place = _parse(url)
    return os.path.realpath(place.path) if place.scheme == "file" else place.url


def _parse(url: str) -> _Place:
    parts = urlsplit(url)
    if parts.scheme not in _KINDS:
        raise ConfigError(f"{_without_secrets(url)!r} is not the URL of a store", hint=f"Use {_FORMS}")
    if parts.query or parts.fragment or "@" in parts.netloc:
        hint = "Keys and options are settings of their own"
        raise ConfigError(f"a store's URL has no query, fragment or user: {_without_secrets(url)!r}", hint=hint)
    if parts.scheme in ("file", "memory"):
        return _parse_local(parts.scheme, parts.netloc, parts.path)
    prefix = parts.path.strip("/")
    if not parts.netloc:
        raise ConfigError(f"{url!r} names no bucket", hint=f"Use {parts.scheme}://bucket/prefix")
    if prefix:
        check_key(prefix)
    return _Place(parts.scheme, parts.netloc, prefix, f"{parts.scheme}://{parts.netloc}/{prefix}".rstrip("/"))


def _parse_local(scheme: str, host: str, path: str) -> _Place:
    if scheme == "memory":
        if host or path.strip("/"):
            raise ConfigError("a memory:// store has neither a name nor a path", hint="Use memory://")
        return _Place(scheme, "", "", "memory://")
    if host not in ("", "localhost") or not path.startswith("/") or not path.strip("/"):
        raise ConfigError("a file:// URL must have an absolute path", hint="Use three slashes: file:///srv/tidelog")
    directory = os.path.normpath(unquote(path))
    return _Place(scheme, "", directory, f"file://{directory}")


def _without_secrets(url: str) -> str:
    """For an error: no user, no password, no query."""
    return url.partition("?")[0].rpartition("@")[2]


def _own_settings(place: _Place, settings: StoreSettings) -> StoreSettings | None:
    """Those of the longest URL that a store is at or below."""
    found: list[tuple[str, StoreSettings]] = []
    for url, own in (settings.replica_stores or {}).items():
        parent = _parse(url).url
        if own.replica_stores is not None:
            raise ConfigError(
                f"replica_stores of {parent} has replica_stores in it", hint="Name all stores side by side"
            )
        if place.url == parent or place.url.startswith(parent.rstrip("/") + "/"):
            found.append((parent, own))
    return max(found, key=lambda one: len(one[0]))[1] if found else None


def _refuse_what_means_nothing(place: _Place, settings: StoreSettings) -> None:
    known = _KINDS[place.scheme].settings
    for name in settings.__struct_fields__:
        if getattr(settings, name) is not None and name not in known:
            takes = ", ".join(sorted(known)) or "no settings"
            raise ConfigError(f"{name} does not apply to a {place.scheme}:// store", hint=f"It takes {takes}")


def _refuse_plain_http(place: _Place, settings: StoreSettings) -> None:
    endpoint = settings.store_endpoint
    if endpoint is None:
        return
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise ConfigError(f"store_endpoint is not an http or https address: {_without_secrets(endpoint)!r}")
    if parts.scheme == "http" and not _allows_http(settings):
        hint = "Use https, or set store_allow_http (AWS_ALLOW_HTTP) if the network is safe"
        raise ConfigError(f"the endpoint of {place.url} is not encrypted: {endpoint}", hint=hint)


def _allows_http(settings: StoreSettings) -> bool:
    if settings.store_allow_http is not None:
        return settings.store_allow_http
    host = urlsplit(settings.store_endpoint or "").hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _with_environment(
    given: StoreSettings, environment: Mapping[str, str], known: Mapping[str, Iterable[str]]
) -> StoreSettings:
    """The settings of an s3:// store, completed from the usual variables; `known` are those besides keys."""
    found: dict[str, Any] = {}
    for name, variables in known.items():
        if getattr(given, name) is None:
            found[name] = next((environment[variable] for variable in variables if environment.get(variable)), None)
    if given.store_allow_http is None and environment.get("AWS_ALLOW_HTTP"):
        found["store_allow_http"] = environment["AWS_ALLOW_HTTP"].lower() in _TRUE
    found |= _keys(given, environment)
    return msgspec.structs.replace(given, **found)


def _keys(given: StoreSettings, environment: Mapping[str, str]) -> dict[str, Any]:
    names = ("store_access_key_id", "store_secret_access_key", "store_session_token")
    if any(getattr(given, name) is not None for name in names):
        if given.store_access_key_id is None or given.store_secret_access_key is None:
            raise ConfigError("store_access_key_id and store_secret_access_key are needed together")
        return {}
    key_id, secret, token = (
        environment.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    )
    if not key_id and not secret:
        return {}
    if not key_id or not secret:
        raise ConfigError("AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are needed together")
    return dict(zip(names, (key_id, Secret(secret), Secret(token) if token else None), strict=True))


# One function a kind


def _open_s3(place: _Place, settings: StoreSettings) -> ObjectStore:
    config: S3Config = {"region": settings.store_region or "us-east-1"}
    if settings.store_endpoint is not None:
        config["aws_endpoint_url_s3"] = settings.store_endpoint
    keys = None if settings.store_access_key_id is None else _Keys(settings)
    client = S3Store(
        place.host,
        prefix=place.path or None,
        config=config,
        client_options=_client_options(settings),
        retry_config=_retries(settings),
        credential_provider=keys,
    )
    return ObstoreStore(client, place.url, _recipe(place, settings), identity=(place.url, settings))


def _open_gs(place: _Place, settings: StoreSettings) -> ObjectStore:
    config: GCSConfig = {}
    if settings.store_endpoint is not None:
        config["base_url"] = settings.store_endpoint
    if settings.store_service_account_path is not None:
        config["service_account"] = settings.store_service_account_path
    client = GCSStore(
        place.host,
        prefix=place.path or None,
        config=config,
        client_options=_client_options(settings),
        retry_config=_retries(settings),
    )
    # Here only the generation of an object can be a condition, not its etag.
    return ObstoreStore(client, place.url, _recipe(place, settings), condition="version")


def _open_az(place: _Place, settings: StoreSettings) -> ObjectStore:
    config: AzureConfig = {}
    if settings.store_endpoint is not None:
        config["endpoint"] = settings.store_endpoint
    if settings.store_account_name is not None:
        config["account_name"] = settings.store_account_name
    if settings.store_account_key is not None:
        config["account_key"] = settings.store_account_key.reveal()
    client = AzureStore(
        place.host,
        prefix=place.path or None,
        config=config,
        client_options=_client_options(settings),
        retry_config=_retries(settings),
    )
    return ObstoreStore(client, place.url, _recipe(place, settings), identity=(place.url, settings))


def _open_file(place: _Place, settings: StoreSettings) -> ObjectStore:
    directory = Path(place.path)
    with explained("open store", directory):
        LocalFiles().make_directories(directory)
    return DirectoryStore(directory, place.url, _recipe(place, settings))


def _open_memory(place: _Place, settings: StoreSettings) -> ObjectStore:
    return ObstoreStore(MemoryStore(), place.url, None)


def _recipe(place: _Place, settings: StoreSettings) -> Reopen:
    # An empty environment: all that it had to say is in the settings by now.
    return open_store, (place.url, settings, {})


def _client_options(settings: StoreSettings) -> ClientConfig:
    connect_ms = settings.store_connect_timeout_ms or DEFAULT_CONNECT_TIMEOUT_MS
    request_ms = settings.store_request_timeout_ms or DEFAULT_REQUEST_TIMEOUT_MS
    return {
        "allow_http": _allows_http(settings),
        "connect_timeout": timedelta(milliseconds=connect_ms),
        "timeout": timedelta(milliseconds=request_ms),
    }


def _retries(settings: StoreSettings) -> RetryConfig:
    given = settings.store_max_retries
    seconds = settings.store_retry_timeout_seconds or DEFAULT_RETRY_TIMEOUT_SECONDS
    return {
        "max_retries": DEFAULT_MAX_RETRIES if given is None else given,
        "retry_timeout": timedelta(seconds=seconds),
    }


_KINDS = {
    "s3": _Kind(
        _HTTP_SETTINGS | {"store_region", "store_access_key_id", "store_secret_access_key", "store_session_token"},
        _open_s3,
    ),
    "gs": _Kind(_HTTP_SETTINGS | {"store_service_account_path"}, _open_gs),
    "az": _Kind(_HTTP_SETTINGS | {"store_account_name", "store_account_key"}, _open_az),
    "file": _Kind(_FETCH_SETTINGS, _open_file),
    "memory": _Kind(_FETCH_SETTINGS, _open_memory),
}
