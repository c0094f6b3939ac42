"""What the records behind a checkpoint say, as recovery and whoever only looks at an engine take them."""

from __future__ import annotations

from tidelog.engine.recovery.recovery import Analysis
from tidelog.engine.wal.records import CheckpointState, encode_checkpoint_end, encode_marks
from tidelog.log.frame import encode_many

STATE = CheckpointState(
    begin_lsn=7,
    begin_position=700,
    time_us=0,
    applied_seq=50,
    low_water_mark=40,
    high_water_mark=30,
    history_start_seq=20,
    next_page=2,
    dirty_pages={},
    transactions={},
)


def later(**marks: int) -> CheckpointState:
    """A checkpoint with other marks."""
    return CheckpointState(**{**{name: getattr(STATE, name) for name in STATE.__struct_fields__}, **marks})


def analysed(*payloads: bytes) -> Analysis:
    """What follows from these records behind the checkpoint."""
    found = Analysis(STATE)
    assert found.take(encode_many(8, payloads)) == []
    return found


def test_a_checkpoint_that_is_complete_in_the_log_counts_before_its_file_is_there() -> None:
    """It may be all that remembers how far the log was shipped, and where history began."""
    found = analysed(encode_checkpoint_end(later(high_water_mark=35, history_start_seq=25)))
    assert (found.high_water_mark, found.history_start_seq) == (35, 25)


def test_marks_of_a_checkpoint_are_taken_together() -> None:
    """Loss prevented: the owner had learned from the store what is final, for its own record of that was gone with a
    crash. A checkpoint whose file was not there yet brought the high-water mark back without it, and no opening worked.
    """
    found = analysed(encode_checkpoint_end(later(low_water_mark=48, high_water_mark=45)))
    assert (found.low_water_mark, found.high_water_mark) == (48, 45)


def test_marks_never_go_back() -> None:
    """Whatever older numbers a record has."""
    older = later(high_water_mark=1, history_start_seq=1)
    found = analysed(encode_marks(45), encode_checkpoint_end(older), encode_marks(2))
    assert (found.low_water_mark, found.high_water_mark, found.history_start_seq) == (45, 30, 20)
