"""What a handler of a Kafka request gets and gives: the server calls one handler per API.

Invariants
- A handler gets the decoded request (`wire/`) and returns the answer, which the server encodes in the version of the
  request; None means that the client expects no answer.
- A handler never blocks the event loop: what waits for a disk or a store runs in a thread.
- A handler answers what it knows how to refuse with Kafka's error codes. An exception that escapes is a bug: the server
  logs it and closes the connection.
- Topics are known by their own names, `namespace/name`, below the handlers. `topic_name` reads what a client sends.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from tidelog.errors import InputError
from tidelog.topics.names import TopicName, parse_topic_name

DEFAULT_NAMESPACE = "default"
ANONYMOUS = "User:ANONYMOUS"
_KEPT_NAMES = 10_000


class RequestContext(NamedTuple):
    """Who asks, and in which version."""

    api_key: int
    version: int
    client_id: str | None
    client_host: str
    principal: str = ANONYMOUS
    connection: object = None
    """The same object for all requests of one connection."""


Handler = Callable[[RequestContext, Any], Awaitable[Any]]
"""One API: the decoded request in, the answer out."""


@functools.lru_cache(_KEPT_NAMES)
def topic_name(sent: str) -> TopicName:
    """The topic that a client means: `shop/orders`, `shop.orders` (the first dot splits), or `orders` in the namespace
    `default`; InputError for what no topic can be called."""
    if "/" in sent:
        return parse_topic_name(sent)
    namespace, dot, name = sent.partition(".")
    return parse_topic_name(f"{namespace}/{name}" if dot else f"{DEFAULT_NAMESPACE}/{sent}")


def listed_name(name: TopicName) -> str:
    """The name in listings: Kafka's rule for names has no slash, so `shop/orders` is `shop.orders`.

    `topic_name` reads it as the same topic: one whose namespace has a dot keeps its slash, for `a.b.c` is `a/b.c`.
    """
    if "." in name.namespace:
        return str(name)
    if name.namespace == DEFAULT_NAMESPACE and "." not in name.name:
        return name.name
    return f"{name.namespace}.{name.name}"


def known_name(sent: str) -> TopicName | None:
    """As `topic_name`, None for what no topic can be called."""
    try:
        return topic_name(sent)
    except InputError:
        return None
