"""The members of a share group: who gets which partitions, and what becomes of a member that is silent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.groups.share_members import LEAVE_EPOCH, ShareGroup, ShareGroupSettings

TOPICS = ("a/a", "b/b", "c/c")


@given(
    counts=st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 7)),
    wanted=st.lists(st.sets(st.sampled_from(TOPICS)), min_size=1, max_size=9),
)
def test_every_partition_has_a_member_that_subscribes_to_it(counts: dict[str, int], wanted: list[set[str]]) -> None:
    """None is left out, and no member gets a topic that it did not ask for; loads differ by one partition at most."""
    group = ShareGroup()
    group.set_topics(counts)
    for number, topics in enumerate(wanted):
        assert group.heartbeat(0, f"member {number}", 0, sorted(topics)) is ErrorCode.NONE
    assigned = {member_id: group.assignment(member_id) for member_id in group.members}
    for number, topics in enumerate(wanted):
        assert set(assigned[f"member {number}"]) <= topics
    for topic, count in counts.items():
        sharing = [found.get(topic, []) for number, found in enumerate(assigned.values()) if topic in wanted[number]]
        if sharing:
            assert {partition for partitions in sharing for partition in partitions} == set(range(count))
            assert max(map(len, sharing)) - min(map(len, sharing)) <= 1


def test_a_silent_member_is_removed_and_must_join_again() -> None:
    """The others get its partitions with the next epoch."""
    group = ShareGroup(ShareGroupSettings(session_timeout_ms=1000))
    group.set_topics({"a/a": 2})
    group.heartbeat(0, "quiet", 0, ["a/a"])
    group.heartbeat(0, "loud", 0, ["a/a"])
    assert group.assignment("loud") == {"a/a": [0]}
    epoch = group.epoch
    assert group.heartbeat(900, "loud", epoch, None) is ErrorCode.NONE
    assert group.expire(1000) == ["quiet"]
    assert group.epoch > epoch
    assert group.assignment("loud") == {"a/a": [0, 1]}
    assert group.heartbeat(1000, "quiet", epoch, None) is ErrorCode.UNKNOWN_MEMBER_ID


def test_what_is_refused() -> None:
    """No id, no topics at the beginning, an epoch from the future, too many members, leaving twice."""
    group = ShareGroup(ShareGroupSettings(max_members=1))
    assert group.heartbeat(0, "", 0, ["a/a"]) is ErrorCode.INVALID_REQUEST
    assert group.heartbeat(0, "one", 0, None) is ErrorCode.INVALID_REQUEST
    assert group.heartbeat(0, "one", 5, ["a/a"]) is ErrorCode.UNKNOWN_MEMBER_ID
    assert group.heartbeat(0, "one", 0, ["a/a"]) is ErrorCode.NONE
    assert group.heartbeat(0, "one", group.epoch + 1, None) is ErrorCode.FENCED_MEMBER_EPOCH
    assert group.heartbeat(0, "two", 0, ["a/a"]) is ErrorCode.GROUP_MAX_SIZE_REACHED
    assert group.heartbeat(0, "one", LEAVE_EPOCH, None) is ErrorCode.NONE
    assert group.heartbeat(0, "one", LEAVE_EPOCH, None) is ErrorCode.UNKNOWN_MEMBER_ID
    assert group.state == "Empty"
