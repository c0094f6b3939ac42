"""What a subscription can be told: each option with its default, its effect and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypedDict

import msgspec

from tidelog.errors import InputError
from tidelog.topics.keywords import find_wrong_keyword, read_units

Kind = Literal["exclusive", "failover", "shared", "key_shared"]
Exhausted = Literal["block", "drop", "dead_letter"]
# A hundred years: longer is a mistake, and infinite does not fit the microseconds that times are counted in.
MAX_SECONDS = 3_155_760_000
_Seconds = Annotated[float, msgspec.Meta(ge=0.001, le=MAX_SECONDS)]
_Pause = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
_Count = Annotated[int, msgspec.Meta(ge=1)]


class DeliveryOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How messages are handed out. Those who share a subscription in one process share its options."""

    kind: Kind = "exclusive"
    """exclusive: one consumer. failover: one at a time, the next takes over. shared: whoever asks gets the next.
    key_shared: messages of one key go to one consumer, in order."""

    max_unacked: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000
    """So many messages may be handed out, or wait to be handed out again, without being acknowledged; then new ones
    wait. Larger keeps more consumers busy and brings more messages again after a crash."""

    ack_timeout_seconds: _Seconds | None = None
    """A message that is not acknowledged for so long is handed out again. None: only when its consumer leaves."""

    max_deliveries: _Count | None = None
    """A message that came back so often is given to `on_exhausted`. None: it comes again for ever."""

    on_exhausted: Exhausted = "dead_letter"
    """dead_letter: it is moved to `dead_letter_topic`. drop: it counts as acknowledged. block: it is kept, and what has
    to come after it waits (all in exclusive and failover, its key in key_shared, nothing in shared) until it is
    acknowledged or the subscription is moved by a seek."""

    dead_letter_topic: str | None = None
    """Default: `<namespace>/<topic>.<subscription>.dlq`."""

    redelivery_backoff_seconds: _Pause = 1.0
    """Pause before a rejected message comes again, doubled with each time. The time-out needs none."""

    redelivery_backoff_max_seconds: _Pause = 60.0
    """The longest such pause."""

    max_rate_per_second: Annotated[float, msgspec.Meta(ge=0.000_001, le=1e9)] | None = None
    """Messages handed out in a second, over all consumers; the others wait."""

    time_to_live_seconds: _Seconds | None = None
    """Messages that are older when their turn comes are passed over, and counted. The age of one with `deliver_at`
    counts from then."""

    on_gap: Literal["raise", "skip"] = "raise"
    """Offsets that a repair marked as lost: an error at that place, or passed over and counted."""

    hold_retention: bool = False
    """Retention deletes nothing that this subscription has not acknowledged."""

    progress_flush_interval_seconds: _Seconds = 5.0
    """How often the position is stored while it moves: what a crash brings again."""

    progress_min_offset_delta: _Count = 1000
    """So many offsets further it is stored sooner, a few times a second at most."""

    @property
    def is_ordered(self) -> bool:
        """Whether one consumer gets everything, in order."""
        return self.kind in ("exclusive", "failover")


class SubscribeOptions(TypedDict, total=False):
    """`DeliveryOptions` as keywords of `subscribe`, with units where a name ends in one."""

    max_unacked: int
    ack_timeout_seconds: float | str | None
    max_deliveries: int | None
    on_exhausted: Literal["block", "dead_letter", "drop"]
    dead_letter_topic: str | None
    redelivery_backoff_seconds: float | str
    redelivery_backoff_max_seconds: float | str
    max_rate_per_second: float | None
    time_to_live_seconds: float | str | None
    on_gap: Literal["raise", "skip"]
    hold_retention: bool
    progress_flush_interval_seconds: float | str
    progress_min_offset_delta: int


def parse_options(given: Mapping[str, Any]) -> DeliveryOptions:
    """Options from keywords; InputError names the wrong one, and one that would have no effect."""
    read = read_units(DeliveryOptions, given)
    wrong = find_wrong_keyword(DeliveryOptions, read, "an option of a subscription")
    if wrong is not None:
        raise InputError(wrong.text, hint=wrong.hint)
    options = msgspec.convert(read, DeliveryOptions)
    _refuse_in_vain(options)
    return options


def _refuse_in_vain(options: DeliveryOptions) -> None:
    """What would be accepted and then have no effect is a mistake that shows only when messages are bad."""
    if options.dead_letter_topic is not None and options.on_exhausted != "dead_letter":
        raise InputError(
            f'dead_letter_topic has no effect with on_exhausted="{options.on_exhausted}"', hint="Leave one of them out"
        )
    if options.max_deliveries is None and (options.dead_letter_topic or options.on_exhausted != "dead_letter"):
        field = "dead_letter_topic" if options.dead_letter_topic else "on_exhausted"
        raise InputError(
            f"{field} has no effect without max_deliveries: messages come again for ever",
            hint="Say after how many times they are given up, as in max_deliveries=5",
        )
