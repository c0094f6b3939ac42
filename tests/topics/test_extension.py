"""Extensions: the marks of batches, producers and delayed messages, and what is refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.errors import DataError, InputError
from tidelog.log import frame
from tidelog.log.tail_cache import Batch
from tidelog.topics.message import (
    LEAST_US,
    MAX_PRODUCER_NAME_BYTES,
    MOST_US,
    BatchMark,
    Extension,
    ProducerMark,
    batch_extensions,
    batch_marks,
    decode_extension,
    decode_extensions,
    encode_deliver_at,
    encode_extension,
    encode_message,
    is_batch_mark,
)

U32 = st.integers(0, (1 << 32) - 1)
U64 = st.integers(0, (1 << 64) - 1)
BATCHES = st.none() | st.builds(
    lambda a, b: BatchMark(min(a, b), max(a, b) + 1), st.integers(0, 99), st.integers(0, 99)
)
PRODUCERS = st.none() | st.builds(ProducerMark, U64, U64, st.text(st.characters(codec="utf-8"), max_size=20))
TIMES = st.none() | st.integers(LEAST_US, MOST_US)


@given(BATCHES, PRODUCERS, TIMES, st.sampled_from([b"", b"\x09\x00", b"\xff\x02ab"]))
def test_what_is_said_is_read_back(
    batch: BatchMark | None, producer: ProducerMark | None, at_us: int | None, unknown: bytes
) -> None:
    """All kinds come back, and kinds of a later version are stepped over."""
    data = encode_extension(batch, producer, at_us)
    assert decode_extension(data + unknown) == Extension(batch, producer, at_us)
    assert bool(data) == any(part is not None for part in (batch, producer, at_us))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x01", "does not fit"),
        (b"\x09\x03ab", "does not fit"),
        (b"\x09\x00\x09\x00", "twice"),
        (b"\x01\x04" + bytes(4), "batch mark"),
        (b"\x01\x08" + bytes(8), "no message 0 in a batch of 0"),
        (b"\x02\x0f" + bytes(15), "producer mark"),
        (b"\x02\x11" + bytes(16) + b"\xff", "UTF-8"),
        (b"\x03\x04" + bytes(4), "time of delivery"),
    ],
)
def test_what_is_damaged_is_named(data: bytes, words: str) -> None:
    """A mark of a wrong shape is a data error, never a guess."""
    with pytest.raises(DataError, match=words):
        decode_extension(data)


@given(st.binary(max_size=40))
def test_noise_is_read_or_refused(data: bytes) -> None:
    """No bytes make decoding fail in any other way."""
    with contextlib.suppress(DataError):
        assert isinstance(decode_extension(data), Extension)


def test_a_name_that_is_too_long_is_refused() -> None:
    """An entry has room for 255 bytes."""
    assert encode_extension(producer=ProducerMark(1, 1, "n" * MAX_PRODUCER_NAME_BYTES))
    with pytest.raises(InputError, match="at most 239 bytes"):
        encode_extension(producer=ProducerMark(1, 1, "n" * (MAX_PRODUCER_NAME_BYTES + 1)))


def test_the_extensions_of_a_batch() -> None:
    """They come out message by message, framed or not, and are None where there are none."""
    mark = Extension(batch=BatchMark(0, 2))
    payloads = [
        encode_message(b"a", None, None, 0),
        encode_message(b"b", b"key", {"h": b"v"}, 0, encode_extension(*mark)),
        b"\x00",
    ]
    frames = frame.encode_many(7, payloads)
    assert decode_extensions(frames, 0, 9) == [None, mark, None]
    assert decode_extensions(frames, 2, 3) == [None]
    assert batch_extensions(Batch(7, frames, 0, 3, [])) == [None, mark, None]
    assert batch_extensions(Batch(7, None, 0, 3, payloads)) == [None, mark, None]
    assert batch_extensions(Batch(7, None, 0, 1, payloads[:1])) is None


def test_a_batch_mark_alone_is_told_from_an_extension_with_more() -> None:
    """Whoever looks for producers in a long topic passes over it without decoding, and over nothing else."""
    mark = batch_marks(2)[1]
    assert is_batch_mark(mark)
    assert decode_extension(mark).producer is None
    whole = encode_extension(BatchMark(1, 2), ProducerMark(1, 2, "p"))
    for more in (whole, encode_deliver_at(5), b"", b"\x02" + mark[1:]):
        assert not is_batch_mark(more)
