"""Whatever a transaction does: what it sees is what the engine will be once its batch is applied."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st
from tests.engine.fake_engine import FakeEngine

from tidelog.engine.entry import Batch, CreateBucket, PutObject
from tidelog.engine.txn.read_set import decode_entry, encode_entry
from tidelog.engine.txn.transaction import Transaction
from tidelog.errors import InputError, NotFoundError

BUCKETS = ("a", "b", "c")
KEYS = ("k", "kk", "l")
Step = Callable[[Transaction], object]
State = dict[str, dict[str, tuple[bytes, dict[str, object]]]]

BUCKET, KEY = st.sampled_from(BUCKETS), st.sampled_from(KEYS)


def put(bucket: str, key: str, data: bytes) -> Step:
    return lambda tx: tx.put(bucket, key, data, {"size": str(len(data))})


def delete(bucket: str, key: str) -> Step:
    return lambda tx: tx.delete(bucket, key)


def copy(bucket: str, key: str, to_bucket: str, to_key: str) -> Step:
    return lambda tx: tx.copy(bucket, key, to_bucket, to_key)


def create_bucket(bucket: str) -> Step:
    return lambda tx: tx.create_bucket(bucket)


def delete_bucket(bucket: str, force: bool) -> Step:
    return lambda tx: tx.delete_bucket(bucket, force)


def read(bucket: str, key: str) -> Step:
    return lambda tx: tx.read(bucket, key)


STEPS: st.SearchStrategy[Step] = st.one_of(
    st.builds(put, BUCKET, KEY, st.binary(max_size=3)),
    st.builds(put, BUCKET, KEY, st.binary(max_size=3)),
    st.builds(delete, BUCKET, KEY),
    st.builds(copy, BUCKET, KEY, BUCKET, KEY),
    st.builds(create_bucket, BUCKET),
    st.builds(delete_bucket, BUCKET, st.booleans()),
    st.builds(read, BUCKET, KEY),
)


def seen_by(reader: Transaction | FakeEngine) -> State:
    """Everything that there is, by listing and reading it."""
    state: State = {}
    for bucket in BUCKETS:
        try:
            listed = list(reader.list_objects(bucket))
        except NotFoundError:
            continue
        assert [info.key for info in listed] == sorted(info.key for info in listed)
        found = {info.key: reader.read(bucket, info.key) for info in listed}
        assert [info.size for info in listed] == [len(found[info.key].data) for info in listed]
        state[bucket] = {key: (value.data, dict(value.metadata)) for key, value in found.items()}
    return state


def taken(tx: Transaction, steps: list[Step]) -> int:
    """How many of the steps were possible; the others must not have done anything."""
    count = 0
    for step in steps:
        try:
            step(tx)
            count += 1
        except InputError:  # NotFoundError is one
            continue
    return count


@given(st.lists(STEPS, min_size=1, max_size=12), st.lists(STEPS, max_size=3))
def test_what_it_sees_is_what_its_batch_makes(steps: list[Step], before: list[Step]) -> None:
    """Step by step, over any state, with what was refused at once left out; and its batch is never refused."""
    engine = FakeEngine()
    engine.apply(
        1, Batch((CreateBucket("a"), CreateBucket("b"), PutObject("a", "k", b"1"), PutObject("a", "l", b"22")))
    )
    for transaction in (before, steps):
        with engine.transaction() as tx:
            taken(tx, transaction)
            state = seen_by(tx)
            try:
                guarded = tx.guarded()
            except InputError:
                assert state == seen_by(engine)  # nothing was written
                continue
        carried = decode_entry(encode_entry(guarded))
        (result,) = engine.apply_many([(engine.applied_seq + 1, carried)])
        assert result.status == "applied"
        assert seen_by(engine) == state
    assert engine.statistics().locks.owners == 0
