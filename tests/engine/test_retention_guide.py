"""The guide to retention keeps its word."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from tidelog.engine.cold.garbage import REASONS

GUIDE = (Path(__file__).resolve().parents[2] / "docs/how-to/engine-retention.md").read_text("utf-8")


def test_the_example_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions go, history begins where it was told to, and what is gone is told."""
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python runs\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(code, {})
    assert said.getvalue().splitlines()[:3] == [
        "6 versions would go",
        "history begins at seq 8",
        "b'picture 8'",
    ]
    assert "states before seq 8 are no longer kept" in said.getvalue()


def test_every_fate_is_explained() -> None:
    """The table has them all."""
    table = GUIDE.partition("| fate | |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(REASONS)
