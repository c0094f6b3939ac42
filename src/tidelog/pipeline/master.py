"""Where Spark runs, looked at before anything is started for it: Java takes seconds to say that a name is none, and
Spark's clients minutes to give up a server that is not there.

Invariant: what Spark understands is never refused; a server counts as there when somebody answers at its port.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from tidelog.errors import ConfigError, RetryError

_FORMS = re.compile(
    r"local|local\[(\*|0*[1-9]\d*)(\s*,\s*\d+)?\]|local-cluster\[[\d\s,]+\]|yarn|(spark|k8s|sc)://\S+", re.ASCII
)
_HINT = "It is local[*], local[4], spark://host:7077, yarn, k8s://..., or sc://host for Spark Connect"
_ADDRESS = re.compile(r"(?P<host>\[[^\]]+\]|[^:/;,\s]+)(?::(?P<port>\d{1,5}))?")
_DEFAULT_PORTS = {"spark": 7077, "sc": 15002}
# Whoever goes through one of these may not reach the server without it.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy", "HTTPS_PROXY", "HTTP_PROXY")
_ANSWER_SECONDS = 10.0


def check_master(master: str) -> None:
    """ConfigError for a name that Spark does not understand, RetryError where nobody answers."""
    if _FORMS.fullmatch(master) is None:
        raise ConfigError(f"{master!r} is no master of Spark", operation="start Spark", hint=_HINT)
    scheme, _, rest = master.partition("://")
    if scheme not in _DEFAULT_PORTS or any(name in os.environ for name in _PROXIES):
        return
    found = [_ADDRESS.match(one) for one in rest.split(",")]
    addresses = [(one["host"].strip("[]"), int(one["port"] or _DEFAULT_PORTS[scheme])) for one in found if one]
    if addresses and not any(_answers(*address) for address in addresses):
        hint = "Is it running, and is the port right?"
        raise RetryError(f"nobody answers at {master}", operation="start Spark", hint=hint)


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), _ANSWER_SECONDS).close()
    except (OSError, OverflowError):
        return False
    return True


@contextmanager
def told_as_settings() -> Iterator[None]:
    """What Java says of a context that it cannot make is about the master and the settings that it was given."""
    from py4j.protocol import Py4JJavaError

    try:
        yield
    except Py4JJavaError as error:
        reason = str(error.java_exception.getMessage()).partition("\n")[0]
        hint = "Check the master, and the settings of Spark"
        raise ConfigError(f"Spark did not start: {reason}", operation="start Spark", hint=hint) from error
