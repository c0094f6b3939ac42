"""What a subscription has done since it was opened, and how it stands."""

from __future__ import annotations

import msgspec


class DeliveryCounters(msgspec.Struct, kw_only=True):
    """Counted since the subscription was opened in this process."""

    delivered: int = 0
    """Handed out, each time counted."""
    redelivered: int = 0
    """Handed out again, of those."""
    acked: int = 0
    nacked: int = 0
    timed_out: int = 0
    filtered: int = 0
    """Passed over because they did not match the filter."""
    expired: int = 0
    """Passed over because they were too old, or deleted by retention before they were read."""
    lost: int = 0
    """Passed over because a repair had marked them as lost."""
    dropped: int = 0
    """Given up after `max_deliveries`."""
    dead_lettered: int = 0
    """Moved to the dead-letter topic."""


class SubscriptionStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a subscription that is open in this process."""

    name: str
    kind: str
    consumers: tuple[str, ...]
    offset: int
    """Everything below is settled."""
    stored_offset: int
    """As far as it is stored: what a crash goes back to."""
    lag_messages: int
    unacked: int
    """With consumers now."""
    waiting: int
    """To be handed out again, or delayed."""
    blocked: int
    """Kept by `on_exhausted="block"`."""
    delivered: int
    redelivered: int
    acked: int
    nacked: int
    timed_out: int
    filtered: int
    expired: int
    lost: int
    dropped: int
    dead_lettered: int
