"""Topic names: two plain parts, and nothing that could lead out of the log directory."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import tidelog
from tidelog import TopicNameError
from tidelog.topics.names import MAX_PART_LENGTH, TopicName, parse_topic_name

PLAIN = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"
OURS = {"tidelog.json", "tidelog.json.tmp"}
parts = st.builds(
    lambda first, rest: first + rest, st.sampled_from(PLAIN), st.text(PLAIN + ".", max_size=MAX_PART_LENGTH - 1)
)


@given(parts, parts)
def test_a_plain_name_is_accepted(namespace: str, name: str) -> None:
    """It comes back as it was, and its directory is two levels below the root."""
    if namespace in OURS:
        return
    parsed = parse_topic_name(f"{namespace}/{name}")
    assert (parsed.namespace, parsed.name, str(parsed)) == (namespace, name, f"{namespace}/{name}")
    assert parsed.directory(Path("/root")).relative_to("/root").parts == (namespace, name)


@given(st.text(st.characters(codec="utf-8") | st.sampled_from("./\\ab\n\x00"), max_size=30))
@example("../x")
@example("x/..")
@example("./x")
@example("a/b\n")
@example("a/b/")
@example("/a/b")
@example("a//b")
@example("a/ü")
@example("a/\u0661")
@example("a\\b")
def test_whatever_is_accepted_is_safe(text: str) -> None:
    """Any text is refused by name or is two parts of allowed characters that stay within the root."""
    try:
        parsed = parse_topic_name(text)
    except TopicNameError:
        return
    assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*/[A-Za-z0-9_-][A-Za-z0-9._-]*", text, re.ASCII)
    assert str(parsed) == text
    assert PurePosixPath("/root", text).parts == ("/", "root", parsed.namespace, parsed.name)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("orders", "needs a namespace and a name"),
        ("", "needs a namespace and a name"),
        ("a/b/c", "needs a namespace and a name"),
        ("/orders", "empty part"),
        ("shop/", "empty part"),
        ("shop/..", "not allowed"),
        ("../orders", "not allowed"),
        ("shop/.hidden", "not allowed"),
        ("shop/or ders", "not allowed"),
        ("shop/bestellungen-für", "not allowed"),
        ("shop/a\x00b", "not allowed"),
        ("shop/orders\n", "not allowed"),
        ("shop/" + "x" * 201, "part of 201 characters"),
        ("x" * 201 + "/orders", "part of 201 characters"),
        ("tidelog.json/x", "tidelog's own"),
    ],
)
def test_what_is_wrong_is_said(text: str, complaint: str) -> None:
    """The error names the name, the reason and what a name looks like."""
    with pytest.raises(TopicNameError, match=complaint) as caught:
        parse_topic_name(text)
    assert "namespace/name" in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("wrong", [None, 5, b"shop/orders", ("shop", "orders")])
def test_a_name_of_the_wrong_type_is_named(wrong: object) -> None:
    """It is an input error, not a failure somewhere below."""
    with pytest.raises(TopicNameError, match=type(wrong).__name__):
        parse_topic_name(wrong)  # type: ignore[arg-type]


def test_the_longest_names_work_on_a_real_disk(tmp_path: Path) -> None:
    """A topic with two parts of the greatest length can be made, listed, read and deleted."""
    longest = "n" * MAX_PART_LENGTH + "/" + "t" * MAX_PART_LENGTH
    with tidelog.open(tmp_path) as log:
        log.topic(longest).append(b"value")
        assert log.topics() == [longest]
        assert [message.value for message in log.topic(longest).read()] == [b"value"]
        log.delete_topic(longest)
        assert log.topics() == []


@pytest.mark.parametrize("name", ["-/-", "_/_", "a.tmp/b.tmp", "wal.ckpt/wal.0000000000.log", "lock/lock", "CON/x."])
def test_odd_names_are_topics_like_any_other(tmp_path: Path, name: str) -> None:
    """Names of files of ours are no trouble where they cannot meet them."""
    with tidelog.open(tmp_path) as log:
        log.topic(name).append(b"value")
    with tidelog.open(tmp_path) as log:
        assert log.topics() == [name]
        assert [message.value for message in log.topic(name).read()] == [b"value"]
        log.delete_topic(name)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "tidelog.json"]


def test_names_are_ordered_and_hashed_by_their_parts() -> None:
    """Two names are the same when both parts are."""
    assert TopicName("a", "b") == parse_topic_name("a/b")
    assert len({TopicName("a", "b"), parse_topic_name("a/b"), TopicName("b", "a")}) == 2
