"""The settings of object stores and metadata stores: each with its effect, its default and the stores it applies to.

None stands for "not given". A setting that does not apply to the kind of store in use is refused, so no setting is ever
accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypedDict

import msgspec

from tidelog.secret import Secret

DEFAULT_CONNECT_TIMEOUT_MS = 5_000
DEFAULT_REQUEST_TIMEOUT_MS = 30_000
DEFAULT_MAX_RETRIES = 5
DEFAULT_PART_BYTES = 8 << 20
DEFAULT_PARTS_IN_FLIGHT = 4
DEFAULT_FETCH_BYTES = 4 << 20
DEFAULT_FETCH_AHEAD = 3
DEFAULT_RETRY_TIMEOUT_SECONDS = 60

_Milliseconds = Annotated[int, msgspec.Meta(ge=1)]


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a store is reached. Where it is says its URL."""

    store_endpoint: str | None = None
    """Address of the service (s3, gs, az): of a server of your own, or of an emulator. Default: the provider's."""

    store_region: str | None = None
    """Region of the bucket (s3). Default: AWS_REGION, then AWS_DEFAULT_REGION, then us-east-1."""

    store_access_key_id: str | None = None
    """Name of the key (s3). Default: AWS_ACCESS_KEY_ID, then the machine's role."""

    store_secret_access_key: Secret | None = None
    """The key itself (s3); needed together with its name."""

    store_session_token: Secret | None = None
    """Token of temporary keys (s3)."""

    store_service_account_path: str | None = None
    """File with a service account's key (gs). Default: GOOGLE_APPLICATION_CREDENTIALS, then the machine's account."""

    store_account_name: str | None = None
    """Storage account (az). Default: AZURE_STORAGE_ACCOUNT_NAME."""

    store_account_key: Secret | None = None
    """Its key (az). Default: AZURE_STORAGE_ACCOUNT_KEY, then the machine's identity."""

    store_allow_http: bool | None = None
    """Whether an http:// endpoint is accepted (s3, gs, az): traffic is not encrypted. Default: this machine only."""

    store_connect_timeout_ms: _Milliseconds | None = None
    """Longest wait for a connection (s3, gs, az). Default: 5000. Shorter notices a dead server sooner."""

    store_request_timeout_ms: _Milliseconds | None = None
    """Longest time of one request, body included (s3, gs, az). Default: 30000. An 8 MiB part must go through in it."""

    store_part_bytes: Annotated[int, msgspec.Meta(ge=5 << 20, le=5 << 30)] | None = None
    """Size of the parts in which an object is uploaded (s3, gs, az). Default: 8 MiB. Larger makes fewer requests."""

    store_parts_in_flight: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None
    """Parts of one object that are sent at once (s3, gs, az). Default: 4. All of them are in memory."""

    store_fetch_bytes: Annotated[int, msgspec.Meta(ge=64 << 10, le=1 << 30)] | None = None
    """Size of the ranges in which history is fetched. Default: 4 MiB. Smaller fetches less for a few messages."""

    store_fetch_ahead: Annotated[int, msgspec.Meta(ge=0, le=64)] | None = None
    """Ranges that are fetched ahead of a reader of history. Default: 3. All of them are in memory."""

    store_max_retries: Annotated[int, msgspec.Meta(ge=0, le=100)] | None = None
    """How often a request that failed for no fault of ours is made again (s3, gs, az). Default: 5. 0 fails at once."""

    store_retry_timeout_seconds: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """After this time no more retries are begun (s3, gs, az). Default: 60."""

    replica_stores: dict[str, StoreSettings] | None = None
    """Settings of further stores, by URL: of replicas in other regions or of other providers. A store takes those of
    the longest URL that it is at or below, and none of the others here. Default: all stores have the same."""


class MetadataSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a metadata store is reached. Where it is says its URL."""

    etcd_user: str | None = None
    """User of a cluster with authentication (etcd, etcds); needed together with the password."""

    etcd_password: Secret | None = None
    """Its password. etcd:// does not encrypt it."""

    etcd_ca_path: str | None = None
    """File with the certificate of the CA that signed those of the members (etcds). Default: what the package `certifi`
    trusts."""

    etcd_cert_path: str | None = None
    """File with a client's certificate, for a cluster that asks for one (etcds)."""

    etcd_key_path: str | None = None
    """File with the certificate's key (etcds)."""


class StoreOptions(TypedDict, total=False):
    """`StoreSettings` as keywords, with units where a name ends in one."""

    store_endpoint: str | None
    store_region: str | None
    store_access_key_id: str | None
    store_secret_access_key: Secret | str | None
    store_session_token: Secret | str | None
    store_service_account_path: str | None
    store_account_name: str | None
    store_account_key: Secret | str | None
    store_allow_http: bool | None
    store_connect_timeout_ms: int | str | None
    store_request_timeout_ms: int | str | None
    store_part_bytes: int | str | None
    store_parts_in_flight: int | None
    store_fetch_bytes: int | str | None
    store_fetch_ahead: int | None
    store_max_retries: int | None
    store_retry_timeout_seconds: int | str | None
    replica_stores: Mapping[str, Mapping[str, object]] | None


class MetadataOptions(TypedDict, total=False):
    """`MetadataSettings` as keywords."""

    etcd_user: str | None
    etcd_password: Secret | str | None
    etcd_ca_path: str | None
    etcd_cert_path: str | None
    etcd_key_path: str | None
