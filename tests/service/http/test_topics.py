"""Topics over HTTP: list, create, describe, change, delete."""

from __future__ import annotations

from tests.service.http.serving import Served


def test_created_topic_is_listed_and_described(served: Served) -> None:
    """A new topic has the partitions and settings that were asked for, and clients of Kafka see it too."""
    made = served.call("PUT", "/v1/topics/shop/orders", {"partitions": 3, "settings": {"retention_seconds": 60}})
    assert made.status == 201
    described = served.ok("GET", "/v1/topics/shop/orders")
    assert made.json == described
    assert [one["partition"] for one in described["partitions"]] == [0, 1, 2]
    assert described["settings"] == {"retention_seconds": 60}
    assert described["effective_settings"]["retention_seconds"] == 60
    assert described["kafka_configs"] == {"retention.ms": "60000"}
    listed = served.ok("GET", "/v1/topics")["topics"]
    assert [(one["name"], one["partitions"]) for one in listed] == [("shop/orders", 3)]
    names = served.in_loop(lambda: [str(one.name) for one in served.node.http.broker.topics()])
    assert names == ["shop/orders"]


def test_topic_that_exists_is_not_created_again(served: Served) -> None:
    """A second creation is a conflict, and changes nothing."""
    served.ok("PUT", "/v1/topics/shop/orders", {"settings": {"retention_seconds": 60}})
    again = served.call("PUT", "/v1/topics/shop/orders", {})
    assert (again.status, again.json["error"]) == (409, "ConflictError")
    assert served.ok("GET", "/v1/topics/shop/orders")["settings"] == {"retention_seconds": 60}


def test_list_continues_after_the_limit(served: Served) -> None:
    """A list that was cut says where to go on, and has a prefix for some of the topics."""
    for name in ("a/one", "b/one", "b/two"):
        served.ok("PUT", f"/v1/topics/{name}", {})
    first = served.ok("GET", "/v1/topics?limit=2")
    assert [one["name"] for one in first["topics"]] == ["a/one", "b/one"]
    rest = served.ok("GET", f"/v1/topics?limit=2&after={first['next']}")
    assert ([one["name"] for one in rest["topics"]], rest["next"]) == (["b/two"], None)
    some = served.ok("GET", "/v1/topics?prefix=b/")
    assert [one["name"] for one in some["topics"]] == ["b/one", "b/two"]


def test_settings_change_and_partitions_grow(served: Served) -> None:
    """A change takes effect at once; null takes a setting back; fewer partitions are refused."""
    served.ok("PUT", "/v1/topics/shop/orders", {"settings": {"retention_seconds": 60, "retention_bytes": 1000}})
    changed = served.ok("PATCH", "/v1/topics/shop/orders", {"settings": {"retention_seconds": None}, "partitions": 2})
    assert changed["settings"] == {"retention_bytes": 1000}
    assert len(changed["partitions"]) == 2
    fewer = served.call("PATCH", "/v1/topics/shop/orders", {"partitions": 1})
    assert (fewer.status, fewer.json["error"]) == (409, "ConflictError")


def test_wrong_settings_are_named(served: Served) -> None:
    """A setting that does not exist, or that cannot be, is refused with its name, and no topic is created."""
    for settings in ({"nme": 1}, {"retention_seconds": -1}, {"name": "x"}, {"kafka_configs": {"a": "b"}}):
        refused = served.call("PUT", "/v1/topics/shop/orders", {"settings": settings})
        assert (refused.status, refused.json["error"]) == (400, "ConfigError")
        assert next(iter(settings)) in refused.json["detail"]
    assert served.ok("GET", "/v1/topics")["topics"] == []


def test_deleted_topic_is_gone(served: Served) -> None:
    """After a deletion the topic is not there; it can be created again, and is empty."""
    served.produce("shop/orders", "one")
    assert served.call("DELETE", "/v1/topics/shop/orders").status == 204
    gone = served.call("GET", "/v1/topics/shop/orders")
    assert (gone.status, gone.json["error"]) == (404, "NotFoundError")
    assert served.call("DELETE", "/v1/topics/shop/orders").status == 404
    again = served.ok("PUT", "/v1/topics/shop/orders", {})
    assert again["partitions"][0]["next_offset"] == 0


def test_purged_topic_is_empty_and_goes_on(served: Served) -> None:
    """Messages before an offset are deleted, or all of them; the next message gets the next offset."""
    served.produce("shop/orders", "zero", "one", "two")
    some = served.ok("POST", "/v1/topics/shop/orders/purge", {"before": {"0": 2}})
    assert some == {"start_offsets": {"0": 2}}
    left = served.ok("GET", "/v1/topics/shop/orders/messages")["messages"]
    assert [one["value"] for one in left] == ["two"]
    assert served.ok("POST", "/v1/topics/shop/orders/purge", {}) == {"start_offsets": {"0": 3}}
    assert served.ok("GET", "/v1/topics/shop/orders/messages")["messages"] == []
    assert served.produce("shop/orders", "three") == [3]


def test_purge_beyond_the_end_deletes_nothing(served: Served) -> None:
    """An offset after the end, or a partition that is not there, is refused."""
    served.produce("shop/orders", "zero")
    for before, status in (({"0": 2}, 404), ({"1": 0}, 400), ({"x": 0}, 400)):
        assert served.call("POST", "/v1/topics/shop/orders/purge", {"before": before}).status == status
    assert served.ok("GET", "/v1/topics/shop/orders")["partitions"][0]["start_offset"] == 0


def test_list_tells_where_open_partitions_stand(served: Served) -> None:
    """Asked for it, the list has what `describe` says of partitions that are open, and opens none."""
    served.produce("shop/orders", "zero")
    assert served.ok("GET", "/v1/topics")["topics"][0]["open_partitions"] is None
    (listed,) = served.ok("GET", "/v1/topics?standing=true")["topics"]
    assert listed["open_partitions"] == served.ok("GET", "/v1/topics/shop/orders")["partitions"]
    assert listed["open_partitions"][0]["cached_messages"] == 1
    assert listed["open_partitions"][0]["unshipped_bytes"] is None
