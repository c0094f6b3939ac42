"""The benchmarks run: tiny, without figures that anybody would believe, so that they do not rot."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

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


@pytest.mark.parametrize(
    "benchmark",
    [pytest.param(one, id=one.name, marks=[pytest.mark.long] * bool(one.needs)) for one in RUN.TABLE],
)
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


def result_at(date: str, **more: Any) -> dict[str, Any]:
    """What the runner has kept of a part."""
    return {"figures": [{"what": "it"}], "scale": 1.0, "date": date, "time": "12:00:00", **more}


def test_run_that_keeps_goes_on_with_what_is_left_and_then_what_is_oldest(tmp_path: Path) -> None:
    """Nothing that was measured is lost when the time is over, and the next run begins elsewhere."""
    out = tmp_path / "results.json"
    kept = {
        "append": result_at("2026-01-02"),
        "columns": result_at("2026-01-01"),
        "reopen": result_at("2026-01-03", scale=0.1),
        "flush": result_at("2026-01-03", failed="ended with 1; its figures are of 2026-01-01"),
    }
    out.write_text(json.dumps({"machine": {}, "results": kept}), "utf-8")
    options = ["--scale", "1", "--minutes", "0", "--keep", "--out", str(out), "--dir", str(tmp_path)]
    command = [sys.executable, str(BENCH / "run.py"), *options, "--only", *kept, "remote"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=True)
    names = [line.partition(":")[0] for line in done.stderr.splitlines() if "the next run has it" in line]
    assert set(names[:3]) == {"flush", "reopen", "remote"}
    assert names[3:] == ["columns", "append"]
    assert json.loads(out.read_text("utf-8"))["results"] == kept


def test_sections_take_turns_and_nothing_large_runs_unasked() -> None:
    """A run whose time is over has something of every section."""
    begun = RUN.in_turn(RUN.TABLE)
    sections = [one.section for one in RUN.TABLE]
    assert [one.section for one in begun[: len(set(sections))]] == list(dict.fromkeys(sections))
    assert sorted(one.name for one in begun) == sorted(RUN.BENCHMARKS)
    assert {one.section for one in RUN.TABLE if one.is_asked_for} == {RUN.MEMORY}


def test_part_that_fails_later_keeps_its_figures_and_says_so(tmp_path: Path) -> None:
    """A timeout does not take away what an earlier run has measured at the same scale."""
    results = RUN.Results(tmp_path / "results.json", keeps=False)
    results.found["append"] = before = result_at("2026-01-01")
    results.add("append", {"failed": "ended with 1", "scale": 1.0})
    assert results.found["append"] == {**before, "failed": "ended with 1; its figures are of 2026-01-01"}
    results.add("append", {"failed": "ended with 1", "scale": 0.1})
    assert "figures" not in results.found["append"]


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


def result_of(*figures: Any, **more: Any) -> dict[str, Any]:
    """What the runner keeps of a benchmark."""
    return {
        "figures": [asdict(figure) for figure in figures],
        "details": {},
        "missing": [],
        "options": ["--rounds", "3"],
        "scale": 1.0,
        "seconds": 1.0,
        "date": "2026-01-02",
        "load": 1.0,
        **more,
    }


def test_page_has_every_figure_and_says_what_is_missing(tmp_path: Path) -> None:
    """The page is made of the results alone: rows with durability and spread, what failed, who was not there."""
    measuring = module("measuring")
    rates = {"tidelog": [300.0, 330.0, 300.0], "Redis": [100.0, 100.0, 50.0]}
    appended = measuring.compared("append, 1 KiB", rates, "Redis", 4, durability="synced")
    seconds = {"1000": [0.1], "10000": [1.0], "100000": [10.0]}
    grown = measuring.at_most("scan", "1, 2, 3 ms", "at 1, 10, 100", 1.0, 1.1, "")
    machine = {**dict.fromkeys(("processor", "system", "python"), "x"), "cores": 2, "memory_gib": 4, "load_before": 0.1}
    results = {
        "append": result_of(appended, missing=["JetStream: nats-server is not installed"]),
        "ship": {"failed": "took longer than 4.0 minutes, and was ended", "date": "2026-01-02", "load": 1.0},
        "growth": result_of(grown, details={"scan": {"clock_s": seconds, "processor_s": seconds}}),
    }
    source = tmp_path / "results.json"
    source.write_text(json.dumps({"machine": machine, "results": results}), "utf-8")
    command = [sys.executable, str(BENCH / "page.py"), "--results", str(source), "--docs", str(tmp_path)]
    subprocess.run(command, check=True, timeout=LIMIT_SECONDS)
    page = (tmp_path / "benchmarks.md").read_text("utf-8")
    row = "| append, 1 KiB | synced | 300 msg/s ±10% | Redis 100 msg/s ±50% | 3.00 | >= 4x, **missed** |"
    assert row in page.splitlines()
    assert "- ship: took longer than 4.0 minutes, and was ended" in page
    assert "- JetStream: nats-server is not installed" in page
    assert "- spark: not in this run" in page
    assert "busy machine" not in page
    for name in ("ratios-light", "ratios-dark", "growth-light", "growth-dark"):
        assert f"benchmarks/{name}.svg" in page
        drawing = ElementTree.parse(tmp_path / "benchmarks" / f"{name}.svg").getroot()
        assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    drawn = (tmp_path / "benchmarks" / "ratios-light.svg").read_text("utf-8")
    assert "append, 1 KiB (synced), Redis" in drawn


def test_page_has_a_row_of_every_benchmark_that_was_measured() -> None:
    """None is told to be missing, not even those of sections that came later."""
    measuring, page = module("measuring"), module("page")
    machine = {**dict.fromkeys(("processor", "system", "python"), "x"), "cores": 2, "memory_gib": 4, "load_before": 0}
    results = {name: result_of(measuring.at_least(f"of {name}", "1", "", 1, 1)) for name in RUN.BENCHMARKS}
    for name in ("growth", "growth_spark", "growth_jobs"):
        results[name]["details"] = {f"{name} {n}": {"processor_s": {"1": [1], "10": [2], "100": [3]}} for n in range(9)}
    made = page.Page({"machine": machine, "results": results})
    text = made.text()
    assert [name for name in RUN.BENCHMARKS if f"| of {name} |" not in text] == []
    assert "What is not here" not in text
    drawing = ElementTree.fromstring(made.drawings()["growth-light.svg"])
    legend = [float(one.get("y", 0)) for one in drawing.iter() if (one.text or "").startswith("growth")]
    assert len(legend) == 27
    assert max(legend) < float(drawing.get("height", 0))


def test_page_from_a_busy_machine_or_a_small_run_says_so(tmp_path: Path) -> None:
    """Nobody takes such figures for what the product does."""
    page = module("page")
    machine = {**dict.fromkeys(("processor", "system", "python"), "x"), "cores": 2, "memory_gib": 4}
    small = {"machine": {**machine, "load_before": 0.0}, "results": {"append": result_of(scale=0.1)}}
    busy = {"machine": {**machine, "load_before": 7.0}, "results": {"append": result_of()}}
    assert "busy machine" in page.Page(small).text()
    assert "busy machine" in page.Page(busy).text()
    results = {"append": result_of(load_before=0.0), "memory_topics_1": result_of(load_before=7.0)}
    quiet = {"machine": {**machine, "load_before": 0.0}, "results": results}
    assert "busy machine" not in page.Page(quiet).text(), "memory does not depend on it"


def test_exponent_is_that_between_the_two_largest_sizes() -> None:
    """What costs the same at any size hides growth only among the small ones; the fastest round counts."""
    growth = module("growth")
    assert growth.exponent({"1": [5.0], "10": [5.0, 5.5], "100": [50.0, 80.0]}) == pytest.approx(1.0)
    assert not growth.figure_of("it", {"10": [1.0], "100": [10.0]}, {"10": [1.0], "100": [13.0]}).met


SLOW = """
import time
from measuring import parser_for, scratch_directory
parser = parser_for("never ends")
parser.add_argument("--rounds")
with scratch_directory(parser.parse_args().dir):
    time.sleep(3600)
"""


def test_benchmark_that_takes_too_long_is_ended_and_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scratch data is gone, and the runner says why there are no figures."""
    monkeypatch.setenv("PYTHONPATH", str(BENCH))
    program, scratch = tmp_path / "slow", tmp_path / "scratch"
    program.with_suffix(".py").write_text(SLOW, "utf-8")
    scratch.mkdir()
    result = RUN.run(RUN.Benchmark("slow", "Topics", program=str(program)), 1.0, scratch, 3)
    assert "took longer than" in result["failed"]
    assert list(scratch.iterdir()) == []
