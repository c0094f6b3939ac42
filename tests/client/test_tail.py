"""Where partitions stand at their owners, as tasks of Spark ask for it."""

from __future__ import annotations

from typing import ClassVar

import pytest
from tests.client.conftest import url_of
from tests.service.http.serving import Served

import tidelog
from tidelog.client.tail import ServerPlace, Stands, TopicState
from tidelog.errors import ServerUnavailableError


class LatePlace(ServerPlace, frozen=True):
    """A server that has not heard of what was done a moment ago, when it is asked for the first time."""

    heard: ClassVar[list[str]] = []

    def state(self, topic: str) -> TopicState:
        found = super().state(topic)
        if topic not in self.heard:
            self.heard.append(topic)
            del found.partitions[-1:]
        return found


def test_partition_that_the_server_has_not_heard_of_is_waited_for(served: Served, client: tidelog.Client) -> None:
    """The catalog may have it first. One that never comes is said to be missing, when the time of the place is over."""
    client.topic("shop/orders", partitions=2)
    stands = Stands(LatePlace(url_of(served)))
    assert [stands.of("shop/orders", number).partition for number in (1, 0)] == [1, 0]
    with pytest.raises(ServerUnavailableError, match="2 partitions of shop/orders, and none of number 2"):
        Stands(ServerPlace(url_of(served), timeout_seconds=0.3)).of("shop/orders", 2)
