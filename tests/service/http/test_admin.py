"""Administration over HTTP: operations, shipping, sealing, verification, orphans, frames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.service.http.serving import Served, serving

import tidelog
from tidelog.log.frame import scan
from tidelog.topics.message import decode_frames

TOPIC = "/v1/topics/shop/orders"


def ended(served: Served, method: str, path: str, body: Any = None) -> Any:
    """The operation that a request started, when it has ended."""
    operation = served.ok(method, path, body)
    while operation["state"] == "running":
        operation = served.ok("GET", f"/v1/operations/{operation['id']}?wait=60")
    return operation


def test_shipping_is_an_operation_with_a_result(tmp_path: Path) -> None:
    """It can be waited for, asked for later, and is in the list."""
    with serving(tmp_path / "data", store=(tmp_path / "store").as_uri()) as served:
        served.ok("PUT", TOPIC, {"partitions": 2})
        served.produce("shop/orders", *"abc", partition="1")
        shipped = ended(served, "POST", f"{TOPIC}/ship")
        assert (shipped["state"], shipped["result"]) == ("done", {"shipped_offsets": {"0": 0, "1": 3}})
        assert (shipped["kind"], shipped["subject"], shipped["done"]) == ("ship", "topic:shop/orders", 2)
        (listed,) = served.ok("GET", "/v1/operations")["operations"]
        assert listed == shipped
        described = served.ok("GET", TOPIC)["partitions"]
        assert [one["shipped_offset"] for one in described] == [0, 3]
        assert served.call("GET", "/v1/operations/none").status == 404


def test_failed_operation_says_why(served: Served) -> None:
    """Without a store nothing can be shipped: the operation has the problem."""
    served.produce("shop/orders", "a")
    failed = ended(served, "POST", f"{TOPIC}/ship")
    assert (failed["state"], failed["problem"]["error"]) == ("failed", "NotSupportedError")


def test_sealed_topic_stays_closed_until_it_is_opened(tmp_path: Path) -> None:
    """The next request does not take it back from the owner that it is meant for."""
    store = (tmp_path / "store").as_uri()
    with serving(tmp_path / "data", store=store) as served:
        served.produce("shop/orders", "a")
        assert ended(served, "POST", f"{TOPIC}/seal")["state"] == "done"
        refused = served.call("GET", f"{TOPIC}/messages")
        assert (refused.status, refused.json["error"]) == (503, "ClosedError")
        with tidelog.open(tmp_path / "other", store=store, metadata="bucket") as other:
            assert [one.value for one in other.topic("shop/orders").read()] == [b"a"]
            other.topic("shop/orders").seal()
        assert served.ok("POST", f"{TOPIC}/open")["partitions"][0]["next_offset"] == 1
        assert served.produce("shop/orders", "b") == [1]


def test_sealing_twice_takes_nothing_from_the_next_owner(tmp_path: Path) -> None:
    """A seal that is asked for again would have to claim the topic, and fence the node that it was sealed for."""
    store = (tmp_path / "store").as_uri()
    with serving(tmp_path / "data", store=store) as served:
        served.produce("shop/orders", "a")
        assert ended(served, "POST", f"{TOPIC}/seal")["state"] == "done"
        with tidelog.open(tmp_path / "other", store=store, metadata="bucket") as other:
            topic = other.topic("shop/orders")
            assert ended(served, "POST", f"{TOPIC}/seal")["state"] == "done"
            assert topic.append(b"b", sync="shipped") == 1


def test_verification_finds_nothing_or_names_it(tmp_path: Path) -> None:
    """A verdict and what was read; damage in the store is a finding."""
    store = tmp_path / "store"
    with serving(tmp_path / "data", store=store.as_uri()) as served:
        served.produce("shop/orders", *"abc")
        ended(served, "POST", f"{TOPIC}/ship")
        fine = ended(served, "POST", f"{TOPIC}/verify")["result"]
        assert (fine["ok"], fine["verdict"], fine["findings"]) == (True, "ok", [])
        assert fine["read"]
        (segment,) = store.rglob("*.tlog")
        damaged = bytearray(segment.read_bytes())
        damaged[-1] ^= 1
        segment.write_bytes(bytes(damaged))
        found = ended(served, "POST", f"{TOPIC}/verify")["result"]
        assert (found["ok"], found["verdict"]) == (False, "damaged")
        assert ended(served, "POST", f"{TOPIC}/verify?cold=false")["result"]["ok"] is True


def test_orphans_are_planned_and_removed(tmp_path: Path) -> None:
    """The plan shows what would go; nothing that a message needs is in it."""
    with serving(tmp_path / "data", store=(tmp_path / "store").as_uri()) as served:
        served.produce("shop/orders", "a")
        ended(served, "POST", f"{TOPIC}/ship")
        planned = ended(served, "GET", f"{TOPIC}/orphans")
        assert planned["result"]["plans"]["0"]["found"] == []
        removed = ended(served, "POST", f"{TOPIC}/orphans/remove")
        assert removed["result"]["reports"]["0"] == {"removed": [], "kept": []}


def test_retention_is_applied_now(served: Served) -> None:
    """The answer has where the partitions begin."""
    served.produce("shop/orders", "a")
    assert ended(served, "POST", f"{TOPIC}/retention")["result"] == {"start_offsets": {"0": 0}}
    assert served.call("POST", f"{TOPIC}/flush").status == 204


def test_topic_without_a_fenced_tail_has_nothing_to_rescue(served: Served) -> None:
    """The list is empty, and a tail that is not there is a problem of the operation."""
    served.produce("shop/orders", "a")
    assert served.ok("GET", f"{TOPIC}/rescue") == {"tails": []}
    failed = ended(served, "POST", f"{TOPIC}/rescue?wait=60", {"name": "e1-x"})
    assert (failed["state"], failed["problem"]["error"]) == ("failed", "NotFoundError")


def test_fenced_tail_is_rescued(tmp_path: Path) -> None:
    """Messages that were accepted and not shipped before another node took over are appended again."""
    store = (tmp_path / "store").as_uri()
    with tidelog.open(tmp_path / "data", store=store, metadata="bucket") as log:
        log.topic("shop/orders", ship_on_close=False, ship_max_delay_seconds=3600).append(b"kept", sync=True)
    with tidelog.open(tmp_path / "other", store=store, metadata="bucket") as other:
        other.topic("shop/orders", take_over=True).append(b"theirs", sync="shipped")
        other.topic("shop/orders").seal()
    with serving(tmp_path / "data", store=store) as served:
        served.ok("GET", TOPIC)
        (tail,) = served.ok("GET", f"{TOPIC}/rescue")["tails"]
        assert (tail["first_offset"], tail["next_offset"], tail["is_set_aside"]) == (0, 1, True)
        rescued = ended(served, "POST", f"{TOPIC}/rescue?wait=60", {"name": tail["name"]})
        assert rescued["result"]["appended"] == 1
        values = [one["value"] for one in served.ok("GET", f"{TOPIC}/messages")["messages"]]
        assert values == ["theirs", "kept"]
        gone = ended(served, "POST", f"{TOPIC}/rescue?wait=60", {"name": tail["name"], "discard": True})
        assert gone["result"] == {"discarded": 1}
        assert served.ok("GET", f"{TOPIC}/rescue") == {"tails": []}


def test_frames_are_those_of_the_log(served: Served) -> None:
    """A reader of raw frames gets the same messages, in steps, with their offsets."""
    served.produce("shop/orders", *(f"{number:03}" for number in range(50)))
    served.produce("shop/orders", "last")
    values: list[bytes] = []
    offset = 0
    while offset < 51:
        answer = served.call("GET", f"{TOPIC}/frames?offset={offset}&max_bytes=500")
        assert answer.headers["x-tidelog-first-offset"] == str(offset)
        found = scan(answer.body, 0, offset)
        assert found.end == len(answer.body)
        values += [message.value or b"" for message in decode_frames(found.frames, 0, found.frames.count)]
        offset = int(answer.headers["x-tidelog-next-offset"])
        assert offset == found.frames.next_offset
    assert values == [*(f"{number:03}".encode() for number in range(50)), b"last"]
    assert served.call("GET", f"{TOPIC}/frames?offset=51").body == b""
    assert served.call("GET", f"{TOPIC}/frames?offset=52").status == 404


@pytest.mark.parametrize("path", ["ship", "seal", "verify", "retention", "orphans/remove"])
def test_operation_on_a_topic_that_is_not_there_is_refused(served: Served, path: str) -> None:
    """It is not even begun."""
    assert served.call("POST", f"{TOPIC}/{path}").status == 404
    assert served.ok("GET", "/v1/operations") == {"operations": []}
