"""Plans over HTTP: what is applied is what was shown, or nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.service.http.serving import Served, serving
from tests.service.http.test_admin import ended

import tidelog

TOPIC = "/v1/topics/shop/orders"
MAIN = "/v1/engines/main"
SETTINGS = {"retention_bytes": 6000, "retention_interval_seconds": 3600}


def orphan(store: Path, name: str) -> Path:
    """An object of an earlier owner whose messages are in a published one, too."""
    (published,) = [one for one in store.rglob("*.tlog") if "e0" not in one.name]
    return Path(shutil.copy(published, published.with_name(name)))


def conflict(operation: Any) -> bool:
    problem = operation["problem"]
    return (operation["state"], problem["status"], problem["error"]) == ("failed", 409, "ConflictError")


class TestOrphans:
    def test_plan_is_applied_as_it_was_shown(self, tmp_path: Path) -> None:
        """An orphan that came after the look stays for the next plan."""
        with serving(tmp_path / "data", store=(tmp_path / "store").as_uri()) as served:
            served.produce("shop/orders", *"abcd")
            ended(served, "POST", f"{TOPIC}/ship")
            shown = orphan(tmp_path / "store", "data-0-3-e0.tlog")
            plan = ended(served, "GET", f"{TOPIC}/orphans")
            assert [one["key"].rpartition("/")[2] for one in plan["result"]["plans"]["0"]["found"]] == [shown.name]
            later = orphan(tmp_path / "store", "data-0-2-e0.tlog")
            done = ended(served, "POST", f"{TOPIC}/orphans/remove?plan={plan['id']}")
            assert len(done["result"]["reports"]["0"]["removed"]) == 1
            assert (shown.exists(), later.exists()) == (False, True)

    def test_plan_that_no_longer_holds_is_refused(self, tmp_path: Path) -> None:
        """What was shown is gone: the operation fails as a conflict, and nothing else is removed."""
        with serving(tmp_path / "data", store=(tmp_path / "store").as_uri()) as served:
            served.produce("shop/orders", *"abcd")
            ended(served, "POST", f"{TOPIC}/ship")
            first, second = (orphan(tmp_path / "store", f"data-0-{at}-e0.tlog") for at in (2, 3))
            plan = ended(served, "GET", f"{TOPIC}/orphans")
            first.unlink()
            assert conflict(ended(served, "POST", f"{TOPIC}/orphans/remove?plan={plan['id']}"))
            assert second.exists()

    def test_plan_of_another_subject_or_kind_is_not_found(self, tmp_path: Path) -> None:
        """An id says what it is about: a plan cannot be applied to anything else."""
        with serving(tmp_path / "data", store=(tmp_path / "store").as_uri()) as served:
            served.produce("shop/orders", "a")
            served.produce("shop/others", "a")
            plan = ended(served, "GET", f"{TOPIC}/orphans")["id"]
            retention = ended(served, "GET", f"{TOPIC}/retention")["id"]
            for path in (f"/v1/topics/shop/others/orphans/remove?plan={plan}", f"{TOPIC}/retention?plan={plan}"):
                assert served.call("POST", path).status == 404
            for wrong in (retention, "none"):
                refused = served.call("POST", f"{TOPIC}/orphans/remove?plan={wrong}")
                assert (refused.status, "new one" in refused.json["hint"]) == (404, True)


class TestRetention:
    def test_plan_is_applied_as_it_was_shown(self, tmp_path: Path) -> None:
        """Messages that are due by now and were not shown stay; a plan is applied once."""
        with serving(tmp_path / "data", store=(tmp_path / "store").as_uri()) as served:
            served.ok("PUT", TOPIC, {"settings": SETTINGS})
            for _ in range(3):
                fill(served)
            (plan,) = (shown := ended(served, "GET", f"{TOPIC}/retention"))["result"]["plans"].values()
            assert (plan["start_offset"], plan["delete_before"], len(plan["objects"])) == (0, 10, 2)
            fill(served)
            done = ended(served, "POST", f"{TOPIC}/retention?plan={shown['id']}")
            assert done["result"] == {"start_offsets": {"0": 10}}
            assert conflict(ended(served, "POST", f"{TOPIC}/retention?plan={shown['id']}"))
            assert served.ok("GET", TOPIC)["partitions"][0]["start_offset"] == 10

    def test_plan_is_refused_when_the_settings_keep_more(self, tmp_path: Path) -> None:
        """Somebody who gives the topic a longer life between look and deletion loses nothing."""
        with serving(tmp_path / "data", store=(tmp_path / "store").as_uri()) as served:
            served.ok("PUT", TOPIC, {"settings": SETTINGS})
            for _ in range(3):
                fill(served)
            shown = ended(served, "GET", f"{TOPIC}/retention")
            (plan,) = shown["result"]["plans"].values()
            assert plan["objects"]
            served.ok("PATCH", TOPIC, {"settings": {"retention_bytes": 1 << 30}})
            assert conflict(ended(served, "POST", f"{TOPIC}/retention?plan={shown['id']}"))
            served.ok("PATCH", TOPIC, {"settings": {"retention_bytes": 6000}})
            done = ended(served, "POST", f"{TOPIC}/retention")
            assert done["result"]["start_offsets"]["0"] >= plan["delete_before"]


def fill(served: Served) -> None:
    """An object of five messages, a little more than 5,000 bytes."""
    served.produce("shop/orders", *["x" * 1000] * 5)
    ended(served, "POST", f"{TOPIC}/ship")


class TestCompaction:
    def test_small_objects_are_merged_beside_appends(self, tmp_path: Path) -> None:
        """Every message is readable from the new object, and the old ones go after the grace period."""
        with serving(tmp_path / "data", store=(tmp_path / "store").as_uri()) as served:
            for number in range(4):
                served.produce("shop/orders", f"{number}a", f"{number}b")
                ended(served, "POST", f"{TOPIC}/ship")
            done = ended(served, "POST", f"{TOPIC}/compact?wait=60")["result"]["reports"]["0"]
            assert (done["replaced_objects"], done["new_objects"]) == (3, 1)
            again = ended(served, "POST", f"{TOPIC}/compact?grace_seconds=0")["result"]["reports"]["0"]
            assert (again["replaced_objects"], again["deleted_objects"]) == (0, 3)
            assert len(list((tmp_path / "store").rglob("*.tlog"))) == 2
            assert ended(served, "POST", f"{TOPIC}/verify")["result"]["ok"]
            served.produce("shop/orders", "last")
            ended(served, "POST", f"{TOPIC}/seal")
        with tidelog.open(tmp_path / "other", store=(tmp_path / "store").as_uri(), metadata="bucket") as log:
            values = [one.value for one in log.topic("shop/orders").read()]
            assert values == [f"{number}{one}".encode() for number in range(4) for one in "ab"] + [b"last"]

    def test_by_key_is_refused_with_the_way(self, served: Served) -> None:
        """What a server cannot do it says, with the command that does; without a store there is nothing to merge."""
        served.produce("shop/orders", "a")
        refused = served.call("POST", f"{TOPIC}/compact?by_key=true")
        assert (refused.status, "tidelog pipeline compact" in refused.json["hint"]) == (422, True)
        assert ended(served, "POST", f"{TOPIC}/compact")["problem"]["error"] == "NotSupportedError"


class TestGarbage:
    def test_plan_is_applied_as_it_was_shown(self, tmp_path: Path) -> None:
        """Versions that came after the look are not touched; a plan is applied once."""
        with serving(tmp_path / "data", engine=tmp_path / "engine") as served:
            put(served, 2, 6)
            shown = ended(served, "GET", f"{MAIN}/garbage?horizon=5")
            assert shown["result"]["removable_versions"] == 3
            put(served, 7, 9)
            done = ended(served, "POST", f"{MAIN}/garbage/collect?plan={shown['id']}")
            assert (done["result"]["removed_versions"], done["result"]["history_start_seq"]) == (3, 5)
            assert conflict(ended(served, "POST", f"{MAIN}/garbage/collect?plan={shown['id']}"))
            versions = served.ok("GET", f"{MAIN}/buckets/photos/objects/cat/versions")["versions"]
            assert [one["seq"] for one in versions] == [9, 8, 7, 6, 5]
            assert served.call("POST", f"{MAIN}/garbage/collect?plan={shown['id']}&horizon=5").status == 400

    def test_without_a_plan_what_is_due_is_collected(self, tmp_path: Path) -> None:
        """A script that needs no look says how far, and gets the report."""
        with serving(tmp_path / "data", engine=tmp_path / "engine") as served:
            put(served, 2, 6)
            assert ended(served, "POST", f"{MAIN}/garbage/collect?horizon=4")["result"]["removed_versions"] == 2

    def test_client_applies_the_plan_that_it_has_seen(self, tmp_path: Path) -> None:
        """`collect_garbage(plan)` is the same over the network; a plan that was collected meanwhile is a conflict."""
        with serving(tmp_path / "data", engine=tmp_path / "engine") as served:
            put(served, 2, 6)
            with tidelog.connect(f"http://{served.address.host}:{served.address.port}") as client:
                engine = client.engine("main")
                first, second = engine.plan_garbage(5), engine.plan_garbage(5)
                assert engine.collect_garbage(first).removed_versions == first.removable_versions == 3
                with pytest.raises(tidelog.ConflictError, match="changed"):
                    engine.collect_garbage(second)


def put(served: Served, first: int, last: int) -> None:
    """A version at each seq."""
    if first == 2:
        bucket = {"seq": 1, "entry": {"type": "CreateBucket", "bucket": "photos"}}
        served.ok("POST", f"{MAIN}/apply", {"entries": [bucket]})
    entry = {"type": "PutObject", "bucket": "photos", "key": "cat", "data": "AAAA"}
    entries = [{"seq": seq, "entry": {**entry, "metadata": {"seq": seq}}} for seq in range(first, last + 1)]
    served.ok("POST", f"{MAIN}/apply", {"entries": entries})
    served.ok("POST", f"{MAIN}/low-water-mark", {"seq": last})
