"""Conditions of entries: decided where an entry is applied, the same everywhere, and kept in the log as a verdict."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.engine.engines import assert_same, copy_alive, open_local
from tests.engine.model import Model
from tests.pipeline.engines.test_entries import rows_of

import tidelog
from tidelog import Batch, CopyObject, CreateBucket, DeleteBucket, DeleteObject, Guarded, ListingRead, ObjectRead
from tidelog import PutObject as Put
from tidelog.engine.engine import Engine
from tidelog.engine.entry import Entry, Operation, Result
from tidelog.engine.txn.read_set import decode_entry, encode_entry
from tidelog.errors import InputError


def test_a_put_that_must_be_the_first_is_refused_the_second_time(tmp_path: Path) -> None:
    """The seq is used, the object stays, and the answer is the same again, also after a restart."""
    with open_local(tmp_path) as engine:
        engine.apply(1, CreateBucket("b"))
        assert engine.apply(2, Put("b", "k", b"one", if_absent=True)).applied
        second = engine.apply(3, Put("b", "k", b"two", if_absent=True))
        assert (second.status, second.reason) == ("refused", "if_absent: 'b'/'k' is there, with seq 2")
        assert engine.applied_seq == 3
        assert engine.read("b", "k").data == b"one"
    with open_local(tmp_path) as engine:
        assert engine.apply(3, Put("b", "k", b"two", if_absent=True)) == second
        engine.apply(4, DeleteObject("b", "k", if_match=2))
        assert engine.apply(5, Put("b", "k", b"three", if_absent=True)).applied


def test_a_compare_and_swap_by_seq_and_by_checksum(tmp_path: Path) -> None:
    """What was read is what must be there."""
    with open_local(tmp_path) as engine:
        engine.apply_many([(1, CreateBucket("b")), (2, Put("b", "k", b"one", {"by": "ann"}))])
        crc = engine.stat("b", "k").crc
        assert crc == tidelog.object_crc(b"one", {"by": "ann"})
        assert engine.apply(3, Put("b", "k", b"x", if_match=1)).reason == "if_match: 'b'/'k' has seq 2, not 1"
        assert engine.apply(4, Put("b", "k", b"two", if_match=2, if_match_crc=crc)).applied
        assert engine.apply(5, Put("b", "k", b"x", if_match=4, if_match_crc=crc)).status == "refused"
        assert engine.apply(6, CopyObject("b", "k", "b", "c", if_match=1)).status == "refused"
        assert engine.apply(7, CopyObject("b", "k", "b", "c", if_absent=True)).applied
        assert engine.apply(8, CopyObject("b", "k", "b", "c", if_absent=True)).status == "refused"
        assert engine.apply(9, DeleteObject("b", "c", if_match=4)).status == "refused"
        assert engine.apply(10, DeleteObject("b", "c", if_match=7)).applied
        assert engine.apply(11, DeleteObject("b", "c", if_match=7)).status == "refused", "there is none any more"


def test_conditions_inside_of_a_batch_see_what_is_before_them_in_it(tmp_path: Path) -> None:
    """The object that a batch has put has the seq of the batch."""
    with open_local(tmp_path) as engine:
        engine.apply(1, CreateBucket("b"))
        crc = tidelog.object_crc(b"v")
        swap = Batch([Put("b", "k", b"v", if_absent=True), CopyObject("b", "k", "b", "l"), DeleteObject("b", "k")])
        assert engine.apply(2, swap).applied
        assert engine.apply(3, Batch([Put("b", "k", b"v"), Put("b", "k", b"w", if_match=3, if_match_crc=crc)])).applied
        late = engine.apply(4, Batch([Put("b", "m", b"v"), Put("b", "m", b"w", if_absent=True)]))
        assert late.reason == "operation 1: if_absent: 'b'/'m' is there, with seq 4"
        assert engine.find_object("b", "m") is None
        copied = Batch([CopyObject("b", "l", "b", "n"), DeleteObject("b", "n", if_match_crc=crc)])
        assert engine.apply(5, copied).applied


def test_guards_work_through_apply(tmp_path: Path) -> None:
    """What was read may be another object than what is written, or a listing."""
    with open_local(tmp_path) as engine:
        engine.apply_many([(1, CreateBucket("b")), (2, Put("b", "k", b"one"))])
        listed = ListingRead.of("b", "", engine.list_objects("b"))
        write = Batch([Put("b", "other", b"v")])
        assert engine.apply(3, Guarded(write, (ObjectRead("b", "k", 2), listed))).applied
        refused = engine.apply(4, Guarded(write, (listed,)))
        assert refused.status == "refused"
        assert engine.apply(4, Guarded(write, (listed,))) == refused
        assert engine.apply_many([(5, Guarded(write, (ObjectRead("b", "none", 0),)))])[0].applied


def test_guard_takes_any_collection_of_reads_and_nothing_else() -> None:
    """A list is what a tuple is; what is no read, or has a seq that no version has, is told before a log has it."""
    write, read = Batch([Put("b", "k", b"v")]), ObjectRead("b", "k", (1 << 64) - 1)
    assert Guarded(write, [read]) == Guarded(write, (read,))  # type: ignore[arg-type]
    for wrong in (5, read, None):
        with pytest.raises(tidelog.InputError, match="reads must be a tuple"):
            Guarded(write, wrong)  # type: ignore[arg-type]
    with pytest.raises(tidelog.InputError, match="must be ObjectRead"):
        Guarded(write, ["b"])  # type: ignore[arg-type]
    with pytest.raises(tidelog.InputError, match="seq must be the seq of a version"):
        ObjectRead("b", "k", 1 << 64)


@pytest.mark.parametrize(
    "conditions",
    [
        {"if_match": 0},
        {"if_match": -1},
        {"if_match": 1 << 64},
        {"if_match": True},
        {"if_match": "1"},
        {"if_match_crc": 1 << 32},
        {"if_match_crc": 1.5},
        {"if_absent": 1},
        {"if_absent": None},
        {"if_absent": True, "if_match": 1},
        {"if_absent": True, "if_match_crc": 1},
    ],
)
def test_a_condition_that_cannot_be_one_is_refused_when_it_is_made(conditions: dict[str, object]) -> None:
    """It never gets into a log."""
    with pytest.raises(InputError, match="if_"):
        Put("b", "k", b"", **conditions)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="if_"):
        CopyObject("b", "k", "c", "l", **conditions)  # type: ignore[arg-type]


def test_an_entry_with_a_condition_is_of_another_version() -> None:
    """A replica that does not know conditions rejects it instead of passing over them."""
    for entry in (Put("b", "k", b"", if_absent=True), Batch([DeleteObject("b", "k", if_match=7)])):
        assert encode_entry(entry)[0] == 2
        assert decode_entry(encode_entry(entry)) == entry
    assert encode_entry(Put("b", "k", b"v"))[0] == 1
    assert decode_entry(encode_entry(Put("b", "k", b"v"))) == Put("b", "k", b"v")


NAMES = st.sampled_from(["a", "b"])
KEYS = st.sampled_from(["x", "y"])
VALUES = st.sampled_from([b"", b"one", b"two" * 60])
CRCS = st.none() | VALUES.map(tidelog.object_crc)
MATCH = st.fixed_dictionaries({}, optional={"if_match": st.integers(1, 12), "if_match_crc": CRCS})
CONDITIONS = MATCH | st.just({"if_absent": True})
OPERATIONS: st.SearchStrategy[Operation] = st.one_of(
    st.builds(CreateBucket, NAMES),
    st.builds(DeleteBucket, NAMES, st.booleans()),
    st.builds(lambda b, k, v, c: Put(b, k, v, **c), NAMES, KEYS, VALUES, CONDITIONS),
    st.builds(lambda b, k, c: DeleteObject(b, k, **c), NAMES, KEYS, MATCH),
    st.builds(lambda a, k, b, m, c: CopyObject(a, k, b, m, **c), NAMES, KEYS, NAMES, KEYS, CONDITIONS),
)
ENTRIES: st.SearchStrategy[Entry] = OPERATIONS | st.lists(OPERATIONS, min_size=1, max_size=4).map(Batch)


@settings(max_examples=examples(40))
@given(st.lists(ENTRIES, max_size=12), st.integers(0, 12))
def test_any_entries_with_conditions_end_as_the_model_says(entries: list[Entry], crash: int) -> None:
    """Results and states, at every seq, also when the process is killed in between and applies its log again."""
    numbered = [(1, CreateBucket("a")), *enumerate(entries, 2)]
    with tempfile.TemporaryDirectory() as scratch:
        first, second = Path(scratch, "first"), Path(scratch, "second")
        model, engine = Model(), open_local(first)
        results = [_apply(engine, model, seq, entry) for seq, entry in numbered[:crash]]
        copy_alive(first, second)
        engine.close(checkpoint=False)
        with open_local(second) as engine:
            assert engine.apply_many(numbered[:crash]) == results, "the same answers again"
            for seq, entry in numbered[crash:]:
                _apply(engine, model, seq, entry)
            assert_same(engine, model, [seq for seq, _ in numbered])


def _apply(engine: Engine, model: Model, seq: int, entry: Entry) -> Result:
    result = engine.apply(seq, entry)
    assert (result.status != "refused") == model.apply(seq, entry)
    return result


def test_a_refused_condition_survives_shipping_restore_and_shows_in_spark(tmp_path: Path) -> None:
    """Nothing decides again: everybody reads the verdict, and the digests are equal."""
    store = f"file://{tmp_path}/store"
    with tidelog.open_engine(tmp_path / "one", store=store) as engine:
        engine.apply_many([(1, CreateBucket("b")), (2, Put("b", "k", b"one")), (4, Put("b", "k", b"x", if_match=1))])
        refused = engine.apply(7, DeleteObject("b", "k", if_match_crc=0))
        engine.update_low_water_mark(7)
        assert engine.ship() == 7
        digest = engine.digest()
    rows = [(row["seq"], row["is_refused"], row["reason"]) for row in rows_of(store, columns="seq,is_refused,reason")]
    reason = "if_match: 'b'/'k' has seq 2, not 1"
    assert rows == [(1, False, None), (2, False, None), (4, True, reason), (7, True, refused.reason)]
    with tidelog.restore_engine(tmp_path / "two", store=store) as engine:
        assert (engine.applied_seq, engine.digest()) == (7, digest)
        assert engine.apply(7, DeleteObject("b", "k", if_match_crc=0)) == refused
