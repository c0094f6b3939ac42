"""The history checker: each way to break a promise is found, and an honest log passes."""

from __future__ import annotations

import threading

import pytest

from tidelog.testing import History, assert_history, check_history


def promises_broken(history: History) -> list[str]:
    return [violation.promise for violation in check_history(history)]


def accept(history: History, *offsets: int, thread: str = "t") -> History:
    """Appends that were answered, with values of their own."""
    for offset in offsets:
        history.attempted(thread, f"v{offset}")
        history.accepted(thread, offset, f"v{offset}")
    return history


def read(history: History, *offsets: int, reader: str = "r") -> History:
    """Reads that got what `accept` appended."""
    for offset in offsets:
        history.read(reader, offset, f"v{offset}")
    return history


class TestOneLife:
    """Between two openings."""

    def test_an_honest_log_breaks_nothing(self) -> None:
        """Readers may start anywhere and be anywhere."""
        history = accept(History(), 0, 1, 2, 3)
        history.synced(1)
        history.synced_through(3)
        read(history, 0, 1, 2, 3)
        read(history, 2, 3, reader="late")
        assert check_history(history) == []
        assert_history(history)

    def test_a_log_need_not_begin_at_zero(self) -> None:
        """What matters is that nothing is missing in between."""
        assert check_history(accept(History(), 7, 8)) == []

    def test_an_offset_given_twice_is_found(self) -> None:
        """Two appends never get the same offset."""
        assert promises_broken(accept(History(), 0, 1, 1)) == ["an offset is used once", "a thread's order is kept"]

    def test_an_offset_given_to_nobody_is_found(self) -> None:
        """Offsets are contiguous."""
        assert promises_broken(accept(History(), 0, 2)) == ["accepted offsets leave no gap"]

    def test_a_thread_whose_messages_changed_places_is_found(self) -> None:
        """What a thread appends first comes first; other threads may come in between."""
        history = accept(History(), 0, 3, thread="a")
        accept(history, 2, 1, thread="b")
        assert promises_broken(history) == ["a thread's order is kept"]

    @pytest.mark.parametrize("offsets", [(0, 2), (1, 0), (0, 0, 1)])
    def test_a_reader_that_skips_goes_back_or_repeats_is_found(self, offsets: tuple[int, ...]) -> None:
        """Each reader gets each offset once, in order."""
        history = read(accept(History(), 0, 1, 2), *offsets)
        assert set(promises_broken(history)) == {"a reader sees no gap and no repeat"}

    def test_a_reader_that_gets_another_value_is_found(self) -> None:
        """An offset has one value."""
        history = accept(History(), 0)
        history.read("r", 0, "other")
        assert promises_broken(history) == ["an offset has one value"]

    def test_a_value_that_nobody_appended_is_found(self) -> None:
        """The log invents nothing."""
        history = accept(History(), 0)
        history.read("r", 1, "v1")
        assert promises_broken(history) == ["what is read was appended"]

    def test_a_message_stored_twice_is_found(self) -> None:
        """An append without an answer explains one message, not two."""
        history = accept(History(), 0)
        history.attempted("t", "w")
        history.read("r", 0, "v0")
        history.read("r", 1, "w")
        assert promises_broken(history) == []
        history.read("r", 2, "w")
        assert promises_broken(history) == ["what is read was appended"]

    def test_a_message_may_be_read_before_its_append_returns(self) -> None:
        """Recording is not atomic with the log."""
        history = read(History(), 0)
        assert check_history(accept(history, 0)) == []


class TestReopening:
    """From one life to the next."""

    def test_what_was_never_synced_may_be_lost_and_its_offset_used_again(self) -> None:
        """The new value is the only one then."""
        history = accept(History(), 0, 1, 2)
        history.synced(0)
        history.reopened(1)
        read(history, 0)
        history.accepted("t", 1, "new")
        history.read("r", 1, "new")
        assert check_history(history) == []

    def test_what_was_synced_and_lost_is_found(self) -> None:
        """An offset at or behind the next one is gone."""
        history = accept(History(), 0, 1)
        history.synced(1)
        history.reopened(1)
        read(history, 0)
        assert promises_broken(history) == ["synced is never lost"]

    def test_a_flush_covers_all_before_it(self) -> None:
        """Also what earlier lives left."""
        history = accept(History(), 0, 1)
        history.reopened(2)
        history.synced_through(1)
        read(history, 0, 1)
        history.reopened(1)
        read(history, 0)
        assert history.synced_offsets == {0, 1}
        assert promises_broken(history) == ["synced is never lost"]

    def test_what_was_synced_and_is_not_read_is_found(self) -> None:
        """Counting it is not enough, it has to be readable."""
        history = accept(History(), 0, 1)
        history.synced_through(1)
        history.reopened(2)
        read(history, 1)
        assert promises_broken(history) == ["synced is read again"]

    def test_what_retention_removed_need_not_be_read(self) -> None:
        """The log says where it begins now."""
        history = accept(History(), 0, 1)
        history.synced_through(1)
        history.reopened(2, start_offset=1)
        read(history, 1)
        assert check_history(history) == []

    def test_an_offset_that_is_skipped_after_reopening_is_found(self) -> None:
        """Accepting goes on exactly where the log says."""
        history = accept(History(), 0)
        history.reopened(1)
        read(history, 0)
        assert promises_broken(accept(history, 2)) == ["accepted offsets leave no gap"]

    def test_an_offset_that_is_in_the_files_and_given_again_is_found(self) -> None:
        """Below the next offset everything is taken."""
        history = accept(History(), 0, 1)
        history.reopened(2)
        read(history, 0, 1)
        history.accepted("t", 1, "new")
        assert "an offset is used once" in promises_broken(history)
        assert "appends continue where the log said" in promises_broken(history)

    def test_an_append_that_the_crash_cut_short_may_be_found(self) -> None:
        """Its answer never came, so it may be there or not, and may even have left a gap among the answers."""
        history = accept(History(), 0, 2)
        history.attempted("other", "w")
        history.reopened(3)
        history.read("r", 0, "v0")
        history.read("r", 1, "w")
        history.read("r", 2, "v2")
        assert check_history(history) == []


def test_a_copy_goes_its_own_way() -> None:
    """One run can be checked under several policies."""
    history = accept(History(), 0)
    other = accept(history.copy(), 1)
    read(other, 0)
    assert (history.values, other.values) == ({0: "v0"}, {0: "v0", 1: "v1"})
    assert history.lives[0].reads == {}


def test_threads_may_record_at_once() -> None:
    """Nothing recorded is lost."""
    history = History()
    threads = [
        threading.Thread(target=lambda n=number: [accept(history, n * 100 + i, thread=f"t{n}") for i in range(100)])
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert check_history(history) == []
    assert sorted(history.values) == list(range(800))


def test_an_assertion_lists_what_is_broken() -> None:
    """The message says which promise, where, and how often."""
    history = read(accept(History(), 0, 1, 2), 0, 2)
    with pytest.raises(AssertionError, match=r"1 violations .*\n.*no gap and no repeat: reader r got 2 after 0"):
        assert_history(history)
