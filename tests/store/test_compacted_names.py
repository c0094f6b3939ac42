"""Names of compacted data: built and parsed the same way, and one spelling for each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.errors import InputError
from tidelog.store.keys import (
    CheckpointId,
    CompactedId,
    DataFileId,
    EngineKeys,
    StatePartId,
    data_name,
    digest_of,
    escape,
    is_key,
    is_part,
    parse_compacted,
    parse_data_name,
    parse_state_part,
)

KEYS = EngineKeys()
NUMBERS = st.integers(0, 2**64 - 1)
DIGESTS = st.binary(max_size=20).map(digest_of)
TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=60)


@given(TEXT)
def test_whatever_a_name_is_it_becomes_a_part_of_a_key(text: str) -> None:
    """Slashes, dots in front, blanks and other alphabets included."""
    escaped = escape(text)
    assert len(escaped) > 200 or is_part(escaped)


@given(TEXT, TEXT)
def test_names_that_differ_are_escaped_differently(one: str, other: str) -> None:
    """No value is ever written over that of another key."""
    assert (escape(one) == escape(other)) == (one == other)


@given(TEXT, TEXT, NUMBERS)
def test_a_data_file_tells_whose_value_it_is(bucket: str, key: str, seq: int) -> None:
    """Bucket, key and seq come out as they went in; where the name were too long there is no file."""
    full = KEYS.data_file(bucket, key, seq)
    if full is None:
        assert max(len(escape(bucket)), len(escape(key))) > 200
    else:
        assert is_key(full)
        assert KEYS.parse_data_file(full) == DataFileId(bucket, key, seq)


@given(st.sampled_from(("blob", "versions", "values", "root")), st.integers(1, 2**64 - 1), DIGESTS)
def test_files_of_a_compaction_tell_their_generation(kind: str, generation: int, digest: str) -> None:
    """And their kind and digest."""
    name = CompactedId(kind, generation, digest)  # type: ignore[arg-type]
    assert KEYS.parse_compacted(KEYS.compacted(name)) == name


@given(NUMBERS, NUMBERS, DIGESTS)
def test_files_of_a_state_tell_where_it_is(seq: int, lsn: int, digest: str) -> None:
    """A part is told from a state, and no state is without a digest."""
    part, state = StatePartId(seq, lsn, digest), CheckpointId(seq, lsn, 7, digest)
    assert KEYS.parse_state_part(KEYS.state_part(part)) == part
    assert KEYS.parse_checkpoint(KEYS.checkpoint(state)) == state
    assert KEYS.parse_checkpoint(KEYS.state_part(part)) is None
    assert KEYS.parse_state_part(KEYS.checkpoint(state)) is None
    with pytest.raises(InputError):
        KEYS.checkpoint(state._replace(digest=""))


@given(st.text(max_size=80))
def test_what_was_not_built_here_is_no_name(text: str) -> None:
    """Any text parses to None, or to what builds the same text again."""
    if (file := parse_compacted(text)) is not None:
        assert str(file) == text
    if (part := parse_state_part(text)) is not None:
        assert str(part) == text
    if (value := parse_data_name(text)) is not None:
        assert data_name(*value) == text


@pytest.mark.parametrize(
    "name",
    [
        "b/k/v000000007.dat",
        "b/k/v00000000007.dat",
        "b/k/v0000000007.DAT",
        "b/k/w/v0000000007.dat",
        "b/.k/v0000000007.dat",
        "b/_6b/v0000000007.dat",
        "b/_C3_BC/v0000000007.dat",
        "b/_ff/v0000000007.dat",
        "b//v0000000007.dat",
        "../k/v0000000007.dat",
        "b/k/v99999999999999999999.dat",
        "b/k/v0000000007.dat\n",
    ],
)
def test_other_spellings_are_refused(name: str) -> None:
    """Too few or too many digits, needless escapes, bytes that are no text, other folders."""
    assert parse_data_name(name) is None
    assert KEYS.data_file_named(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "blobs/blob-0000000000-" + "a" * 32 + ".tblb",
        "blobs/blob-1-" + "a" * 32 + ".tblb",
        "index/blob-0000000001-" + "a" * 32 + ".tblb",
        "index/versions-0000000001-" + "a" * 32 + ".json",
        "index/root-0000000001-" + "A" * 32 + ".json",
        "index/root-0000000001-" + "a" * 31 + ".json",
    ],
)
def test_other_files_are_none_of_a_compaction(name: str) -> None:
    """Generation 0, other folders, other endings, other digests."""
    assert parse_compacted(name) is None


def test_what_cannot_be_a_name_is_not_built() -> None:
    """Wrong numbers and digests are refused before they come into a store."""
    with pytest.raises(InputError):
        KEYS.compacted(CompactedId("blob", 0, "a" * 32))
    with pytest.raises(InputError):
        KEYS.state_part(StatePartId(1, 2, "short"))
    with pytest.raises(InputError):
        KEYS.checkpoint(CheckpointId(1, 2, 3, "short"))
    with pytest.raises(InputError):
        KEYS.data_file("", "k", 7)
