"""The benchmarks run: tiny, without figures that anybody would believe, so that they do not rot."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.servers import S3Server

BENCH = Path(__file__).resolve().parents[2] / "bench"
TINY = 0.0001
LIMIT_SECONDS = 600
FIGURE = {"what", "ours", "peer", "value", "target", "met", "durability", "ours_rounds", "peer_rounds"}


def module(name: str) -> Any:
    """A module of the benchmarks, which are no package."""
    if str(BENCH) not in sys.path:
        sys.path.append(str(BENCH))
    return importlib.import_module(name)


RUN = module("run")


@pytest.mark.parametrize("benchmark", [one for one in RUN.TABLE if not one.needs], ids=lambda one: str(one.name))
def test_benchmark_runs_and_its_result_has_the_fields(
    benchmark: Any, tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the page and the plots are made of is there for every benchmark, and no line of it was left out."""
    monkeypatch.setenv("BENCH_S3", s3_server.endpoint)
    result = RUN.run(benchmark, TINY, tmp_path, LIMIT_SECONDS)
    assert "failed" not in result, result
    assert result["figures"]
    for figure in result["figures"]:
        assert figure.keys() == FIGURE
        assert figure["what"]
        assert figure["ours"]
        assert isinstance(figure["value"], int | float)
    assert {"details", "missing", "scale", "seconds", "options"} <= result.keys()


def test_runner_names_what_failed_and_keeps_the_other_results(tmp_path: Path) -> None:
    """A run that nobody watches loses nothing to one part that fails or has no time."""
    out = tmp_path / "results.json"
    kept = {"machine": {}, "results": {"spark": {"figures": [], "date": "2026-01-01"}}}
    out.write_text(json.dumps(kept), "utf-8")
    options = ["--only", "scan_frames", "columns", "--minutes", "0", "--out", str(out), "--dir", str(tmp_path)]
    command = [sys.executable, str(BENCH / "run.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert done.returncode == 1
    found = json.loads(out.read_text("utf-8"))["results"]
    assert found["spark"] == kept["results"]["spark"]
    assert "minutes were over" in found["scan_frames"]["failed"]
    assert "columns: the 0 minutes were over" in done.stderr


def test_peer_that_is_not_installed_is_named_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """One line says which peer is missing and how it gets there; the others are compared."""
    measuring = module("measuring")

    def absent() -> str:
        return str(measuring.program("no-such-server", remedy="pip install it"))

    missing: list[str] = []
    found = measuring.those_here({"absent": absent, "here": lambda: "peer"}, missing)
    assert found == {"here": "peer"}
    assert missing == ["absent: no-such-server is not installed: pip install it"]
    assert capsys.readouterr().err.count("\n") == 1


def test_contenders_take_turns_and_nobody_is_always_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round begins with the next one; the medians and the spread are those of the rounds."""
    measuring = module("measuring")
    monkeypatch.setenv(measuring.UNSETTLED, "1")
    order: list[str] = []

    def contender(name: str, rates: list[float]) -> Any:
        def measure() -> float:
            order.append(name)
            return rates.pop(0)

        return measure

    found = measuring.alternate(
        {"tidelog": contender("tidelog", [30, 10, 20]), "peer": contender("peer", [5, 4, 6])}, 3
    )
    assert order == ["tidelog", "peer", "peer", "tidelog", "tidelog", "peer"]
    figure = measuring.compared("it", found, "peer", 3, durability="synced")
    assert (figure.value, figure.met, figure.ours, figure.peer) == (4.0, True, "20 msg/s", "peer 5 msg/s")
    assert measuring.spread(figure.ours_rounds) == 0.5
