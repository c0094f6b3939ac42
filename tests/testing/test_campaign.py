"""Campaigns: they stop when their time is over, say what is left, and begin with it the next time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
from tests.campaign import load_profile
from tests.campaign_plugin import Campaign

load_profile()

def pytest_configure(config):
    config.pluginmanager.register(Campaign(config), "campaign")
"""
TESTS = """
from pathlib import Path
from hypothesis import given, settings, strategies as st
from tests.campaign import SEED
from tests.campaign import every
from tests.campaign import examples
from tests.campaign import first_seed

seen = []

def note(name):
    with Path("ran").open("a") as file:
        file.write(name + " ")

def test_a():
    note("a")

def test_b():
    note("b")
    assert not Path("broken").exists()

@settings(max_examples=examples(3))
@given(st.integers())
def test_c(number):
    seen.append(number)

def test_d():
    note(f"{SEED} {every(7)} {len(seen)} {first_seed()} {sum(seen)}")
"""


def run(directory: Path, minutes: str = "5", seed: str = "1") -> tuple[int, str, list[str]]:
    """Exit code, output, and what the tests noted."""
    (directory / "conftest.py").write_text(CONFTEST)
    (directory / "test_some.py").write_text(TESTS)
    (directory / "ran").write_text("")
    variables = {"HYPOTHESIS_PROFILE": "deep", "CAMPAIGN_SEED": seed, "CAMPAIGN_MINUTES": minutes}
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--rootdir", str(directory), str(directory)],
        cwd=directory,
        env={**os.environ, **variables, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, (directory / "ran").read_text().split()


def test_what_failed_or_did_not_run_comes_first(tmp_path: Path) -> None:
    """Without time nothing begins, which is no failure; what fails fails the campaign, and is the first of the next."""
    code, told, ran = run(tmp_path, minutes="0")
    assert (code, ran) == (0, [])
    assert "4 of 4 tests did not run" in told
    assert "test_some.py::test_b" in told
    (tmp_path / "broken").touch()
    code, _, ran = run(tmp_path)
    assert (code, ran[:2]) == (1, ["a", "b"])
    (tmp_path / "broken").unlink()
    code, told, ran = run(tmp_path)
    assert (code, ran[:2]) == (0, ["b", "a"])
    assert "did not run" not in told


def test_a_seed_makes_the_same_choices_again(tmp_path: Path) -> None:
    """Ten times the examples, every cut, and all of it by the seed that is shown."""
    code, told, first = run(tmp_path)
    assert code == 0
    assert "CAMPAIGN_SEED=1" in told
    seed, every, count = first[2:5]
    assert (seed, every) == ("1", "1")
    assert int(count) >= 30
    assert run(tmp_path, seed="2")[2][2:] != first[2:]
    assert run(tmp_path)[2][2:] == first[2:]
