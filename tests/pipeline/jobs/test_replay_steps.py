"""The steps of a replay: whoever runs it, killed anywhere or twice at once, the same ranges are written, each once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples

from tidelog.pipeline.address import find_root
from tidelog.pipeline.jobs.replay_topic import ReplaySteps, Step, open_steps

END = 100


class Runner:
    """One run of a replay; what it writes is a consignment, of which each version comes in once."""

    def __init__(self, steps: ReplaySteps, staged_commits: dict[int, Step], step_size: int, end: int) -> None:
        self._staged_commits = staged_commits
        self._steps: Iterator[Step] = steps.all(0, lambda first: min(first + step_size, end))
        self._settled: Step | None = None

    def go_on(self) -> bool:
        """Settles the next step, or writes the one that is settled. False: it has come to its end."""
        if self._settled is None:
            self._settled = next(self._steps, None)
            return self._settled is not None
        self._staged_commits.setdefault(self._settled.end, self._settled)
        self._settled = None
        return True


runs = st.lists(st.tuples(st.integers(1, 60), st.integers(1, END), st.integers(0, 12)), min_size=1, max_size=6)


@given(runs, st.lists(st.integers(0, 5), max_size=40))
@settings(max_examples=examples(40), deadline=None)
def test_every_offset_is_written_once_whatever_is_killed(runs: list[tuple[int, int, int]], order: list[int]) -> None:
    """Runs of other step sizes and ends, beside each other and one after the other, each left at any moment."""
    with TemporaryDirectory() as directory:
        Path(directory, "data").mkdir()
        root, written = find_root(Path(directory, "data")), dict[int, Step]()
        with open_steps(root, "shop/copy", "mine", "source") as steps:
            runners = [Runner(steps, written, size, end) for size, end, _ in runs]
            for index in order:
                runners[index % len(runners)].go_on()
            for runner, (_, _, moves) in zip(runners, runs, strict=True):
                for _ in range(moves):
                    runner.go_on()
            last = Runner(steps, written, 7, END)
            while last.go_on():
                pass
    found = sorted(written.values())
    assert found[0].first == 0
    assert found[-1].end == END
    assert all(before.end == behind.first for before, behind in pairwise(found))
