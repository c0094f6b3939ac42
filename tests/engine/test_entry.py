"""Entries: right from the moment they are made, and unchangeable."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.engine import entry as entries
from tidelog.engine.entry import (
    MAX_BUCKET_BYTES,
    MAX_KEY_BYTES,
    MAX_METADATA_BYTES,
    Batch,
    CopyObject,
    CreateBucket,
    DeleteBucket,
    DeleteObject,
    Entry,
    Operation,
    PutObject,
    operations,
)
from tidelog.errors import InputError

LONE: list[Operation] = [
    CreateBucket("b"),
    DeleteBucket("b", force=True),
    PutObject("b", "k", b"data", {"type": "text"}),
    DeleteObject("b", "k"),
    CopyObject("b", "k", "c", "l"),
]


def problem(make: object, *arguments: object, **keywords: object) -> str:
    """What is said about an entry that cannot be made."""
    assert callable(make)
    with pytest.raises(InputError) as caught:
        make(*arguments, **keywords)
    return str(caught.value)


def test_fields_are_given_by_place_or_by_name() -> None:
    """Both ways of making an entry give the same one."""
    assert PutObject("b", "k", b"d") == PutObject(bucket="b", key="k", data=b"d", metadata={})
    assert CopyObject("a", "b", "c", "d") == CopyObject(src_bucket="a", src_key="b", dest_bucket="c", dest_key="d")


@pytest.mark.parametrize("entry", LONE, ids=lambda entry: type(entry).__name__)
def test_entries_cannot_be_changed(entry: Entry) -> None:
    """What was checked stays as it was."""
    field = entry.__struct_fields__[0]
    with pytest.raises(AttributeError):
        setattr(entry, field, "other")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "is empty"),
        ("a\0b", "NUL"),
        ("x" * (MAX_KEY_BYTES + 1), f"may have {MAX_KEY_BYTES}"),
        ("é" * (MAX_KEY_BYTES // 2 + 1), "bytes in UTF-8"),
        ("\ud800", "half a surrogate pair"),
        (b"bytes", "must be text, not bytes"),
        (None, "must be text, not None"),
    ],
)
def test_a_wrong_key_is_named_with_what_is_wrong(name: object, said: str) -> None:
    """Every entry with a key says which field it is and what to do."""
    for text in (
        problem(PutObject, "b", name, b""),
        problem(DeleteObject, "b", name),
        problem(CopyObject, "b", "k", "b", name),
        problem(CopyObject, "b", name, "b", "k"),
    ):
        assert "key " in text
        assert said in text


@pytest.mark.parametrize("name", ["", "a\0b", "x" * (MAX_BUCKET_BYTES + 1), "é" * 128, 7])
def test_a_wrong_bucket_is_refused_by_every_entry(name: object) -> None:
    """No entry with a bucket that cannot be one comes into being."""
    for text in (
        problem(CreateBucket, name),
        problem(DeleteBucket, name),
        problem(PutObject, name, "k", b""),
        problem(DeleteObject, name, "k"),
        problem(CopyObject, name, "k", "b", "k"),
        problem(CopyObject, "b", "k", name, "k"),
    ):
        assert "bucket " in text


@given(st.text(min_size=1, max_size=60), st.text(min_size=1, max_size=300))
def test_names_are_accepted_exactly_when_they_fit(bucket: str, key: str) -> None:
    """UTF-8 without NUL and within the lengths is accepted; everything else is refused."""
    fits = True
    for name, most in ((bucket, MAX_BUCKET_BYTES), (key, MAX_KEY_BYTES)):
        try:
            fits = fits and "\0" not in name and len(name.encode()) <= most
        except UnicodeEncodeError:
            fits = False
    if fits:
        assert PutObject(bucket, key, b"").key == key
    else:
        problem(PutObject, bucket, key, b"")


def test_the_longest_names_are_accepted() -> None:
    """The bounds themselves are inside."""
    assert PutObject("b" * MAX_BUCKET_BYTES, "é" * (MAX_KEY_BYTES // 2), b"").data == b""


@pytest.mark.parametrize("data", [bytearray(b"abc"), memoryview(b"abc"), memoryview(bytearray(b"abc"))])
def test_data_that_could_change_is_copied(data: bytearray | memoryview) -> None:
    """What the caller does to its buffer afterwards does not reach the entry."""
    entry = PutObject("b", "k", data)
    assert type(entry.data) is bytes
    if isinstance(data, bytearray):
        data[0] = 0
    assert entry.data == b"abc"


def test_text_as_data_is_refused_with_the_cure() -> None:
    """Who gives text hears that it is to be encoded."""
    wanted = "data must be bytes, a file object or an iterator of bytes"
    assert f"{wanted}, not str; encode text first" in problem(PutObject, "b", "k", "text")
    assert f"{wanted}, not int" in problem(PutObject, "b", "k", 5)
    assert f"{wanted}, not list" in problem(PutObject, "b", "k", [b"a"])


def test_too_much_data_is_refused_before_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object must fit into a frame of the log."""
    monkeypatch.setattr(entries, "MAX_DATA_BYTES", 10)
    assert PutObject("b", "k", bytes(10)).data == bytes(10)
    for data in (bytes(11), memoryview(bytearray(11)), memoryview(bytes(12)).cast("I")):
        assert "may have 10" in problem(PutObject, "b", "k", data)


def test_metadata_is_copied_and_sorted() -> None:
    """The same metadata in another order is the same entry, and the caller's dict stays the caller's."""
    given_first = {"b": 1, "a": bytearray(b"x"), "c": None, "d": True, "e": 1.5, "f": "é"}
    entry = PutObject("b", "k", b"", given_first)
    given_first["a"] = 5
    assert list(entry.metadata.items()) == [("a", b"x"), ("b", 1), ("c", None), ("d", True), ("e", 1.5), ("f", "é")]


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"a": []}, "metadata['a'] must be text, a number"),
        ({"a": {}}, "metadata['a'] must be text, a number"),
        ({1: "a"}, "must have text as its keys, not int"),
        ({"a": 1 << 64}, "must fit into 64 bits"),
        ({"a": -(1 << 63) - 1}, "must fit into 64 bits"),
        ({"a": float("nan")}, "give None in place of NaN"),
        ({"a": "\ud800"}, "half a surrogate pair"),
        ({"\ud800": "a"}, "half a surrogate pair"),
        (["a"], "must be a dict, not list"),
        (None, "must be a dict, not None"),
    ],
)
def test_wrong_metadata_is_named(metadata: object, said: str) -> None:
    """The field and the kind of value are in the error."""
    assert said in problem(PutObject, "b", "k", b"", metadata)


def test_too_much_metadata_never_becomes_an_entry() -> None:
    """In a log that engines follow, none of them could go past it; what just fits is accepted."""
    room = MAX_METADATA_BYTES - 8
    assert len(PutObject("b", "k", b"", {"a": "x" * room}).metadata["a"]) == room
    with pytest.raises(InputError, match="metadata takes 1048577 bytes and may take 1048576"):
        PutObject("b", "k", b"", {"a": "x" * (room + 1)})


def test_a_batch_holds_lone_operations() -> None:
    """A batch is a tuple of them; another batch, nothing, or something else is refused."""
    assert Batch([*LONE]).entries == tuple(LONE)
    assert "entries has 0 entries" in problem(Batch, [])
    assert "entries[1] must be a lone operation, not a batch in a batch" in problem(Batch, [LONE[0], Batch((LONE[0],))])
    assert "entries[0] must be a lone operation, not str" in problem(Batch, ["x"])
    assert "must be a list of entries, not CreateBucket" in problem(Batch, LONE[0])


def test_a_wrong_force_is_refused() -> None:
    """To delete everything in a bucket needs a clear word."""
    assert "force must be True or False, not 'no'" in problem(DeleteBucket, "b", "no")


def test_operations_of_an_entry() -> None:
    """A lone entry is its own operation, a batch has several, and anything else is refused."""
    for entry in LONE:
        assert operations(entry) == (entry,)
    assert operations(Batch(tuple(LONE))) == tuple(LONE)
    assert "str is no entry" in problem(operations, "entry")


@pytest.mark.parametrize("entry", [*LONE, Batch(tuple(LONE))], ids=lambda entry: type(entry).__name__)
def test_entries_travel_as_msgpack(entry: Entry) -> None:
    """What is encoded comes back equal, checked again on the way in."""
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(entry), type=Entry) == entry


def test_hostile_msgpack_is_checked_like_everything_else() -> None:
    """Decoding makes no entry that could not be made by hand."""
    data = msgspec.msgpack.encode({"type": "CreateBucket", "bucket": "a\0b"})
    with pytest.raises(msgspec.ValidationError, match="NUL"):
        msgspec.msgpack.decode(data, type=Entry)
