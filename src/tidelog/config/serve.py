"""The settings of `tidelog serve`: who may connect, how connections are protected, and how much of them there may be.

They are the table `[serve]` of the file, variables `TIDELOG_TLS_CERT` and so on, and options `--tls-cert`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

_Seconds = Annotated[float, msgspec.Meta(ge=0.1)]


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the server is protected. Its addresses are options of the command."""

    cluster: bool | None = None
    """Whether this node joins the cluster of its store and metadata store. Default: it does where the metadata store is
    etcd."""

    node: str | None = None
    """The name of this node in its cluster. Default: the name that its log directory got when it was made."""

    zone: str = ""
    """Where this node is, such as a rack or an availability zone: partitions of a topic are spread over zones."""

    cluster_lease_seconds: Annotated[float, msgspec.Meta(ge=2)] = 10.0
    """After so long without a sign of life a node's partitions are given to others. Shorter is faster after a crash,
    and takes a node for dead sooner that is only slow; each third of it costs two small writes to etcd."""

    history_from_any_node: bool = True
    """Whether consumers of Kafka's protocol that are far behind are sent to other nodes of the cluster, which read the
    store for them (KIP-392). Give all nodes the same. `false`: they read history from the owner of a partition."""

    auth: Literal["off", "required"] = "off"
    """Whether clients must say who they are, and need grants (`tidelog auth`). `off`: everybody may do everything,
    which only addresses of this machine allow by themselves."""

    tls_cert: str | None = None
    """File with the server's certificate and those between it and the root, in PEM: both listeners speak TLS then."""

    tls_key: str | None = None
    """File with the key of the certificate, in PEM, without a password."""

    tls_client_ca: str | None = None
    """File with the certificates that sign those of clients, in PEM: a client with such a certificate is authenticated
    by it."""

    tls_principal: Literal["common_name", "subject", "san"] = "common_name"
    """Who a client's certificate is about: the common name of its subject, the whole subject (`CN=a,O=b`), or its first
    alternative name (DNS, mail or URI)."""

    allow_plaintext: bool = False
    """Listens without TLS on addresses that other machines reach. Passwords and messages can be read on the way, unless
    something else encrypts it."""

    allow_anonymous: bool = False
    """Listens without authentication on addresses that other machines reach: everybody there may do everything."""

    oauth_keys: str | None = None
    """File with the keys of the issuer of tokens (JWT): a JWKS, or one public key in PEM. Turns OAUTHBEARER on."""

    oauth_issuer: str | None = None
    """What tokens must have as `iss`."""

    oauth_audience: str | None = None
    """What tokens must have among `aud`."""

    oauth_principal_claim: str = "sub"
    """The claim that says who a token is about."""

    tracing: bool = False
    """Traces requests, syncs, shipping and reads of the store by OpenTelemetry, which has to be installed
    (`tidelog[otel]`) and told where to send them. Costs about 0.15 ms a request."""

    auth_reload_seconds: _Seconds = 5.0
    """How often users, tokens and grants are looked up: so long a change takes until it counts, unless SIGHUP is sent.
    Each time costs one small read of the metadata store."""

    auth_session_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """After so long a connection of Kafka's protocol must authenticate again; 0: never, except for tokens that end."""

    max_connections: Annotated[int, msgspec.Meta(ge=1)] = 10_000
    """Further connections are refused, on each of both listeners."""

    max_connections_per_address: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The same for one address of clients of Kafka's protocol; 0: no limit of its own."""

    connection_idle_seconds: _Seconds = 600.0
    """A connection of Kafka's protocol without a request for so long is closed."""

    unread_seconds: _Seconds = 60.0
    """A client of either side that reads nothing of what is sent to it for so long is cut: what waits for it is in
    memory. One that reads slowly is not."""

    max_request_bytes: Annotated[int, msgspec.Meta(ge=1024, le=1 << 30)] = 100 << 20
    """A larger request of Kafka's protocol closes its connection. Before authentication it is 64 KiB."""
