"""What tidelog logs about itself: one record with fields for each event, nothing for a message, and no secret."""

from __future__ import annotations

import ast
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.topics.removing import NAME, Shop

import tidelog
from tidelog import events
from tidelog.errors import ConfigError
from tidelog.findings import Finding
from tidelog.pipeline.address import Root
from tidelog.pipeline.jobs.job import JobReport, logged

PIPELINE = Path(tidelog.__file__).parent / "pipeline"
SECRET = "correct horse battery staple"


@pytest.fixture(autouse=True)
def quiet_again() -> Iterator[None]:
    """What a test turned on is off again behind it."""
    logger = logging.getLogger("tidelog")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    """The events since then."""
    caplog.set_level(logging.INFO, "tidelog")
    return Told(caplog)


class Told:
    """Events as an application's own handler gets them."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def named(self, event: str) -> list[dict[str, Any]]:
        """The fields of all events of one name."""
        return [vars(one) for one in self._caplog.records if getattr(one, "event", None) == event]

    def one(self, event: str, **expected: object) -> dict[str, Any]:
        """The only one of its name that has these fields."""
        found = [one for one in self.named(event) if expected.items() <= one.items()]
        assert len(found) == 1, (event, expected, self.named(event))
        return found[0]

    def clear(self) -> None:
        """What was told so far is of no interest."""
        self._caplog.clear()


class TestTopics:
    """A log directory and its topics."""

    def test_opening_rotation_and_recovery(self, tmp_path: Path, told: Told) -> None:
        """Each says which topic it was, the offsets and the bytes."""
        with tidelog.open(tmp_path / "data", rotate_max_bytes=200) as log:
            topic = log.topic("shop/orders")
            for _ in range(5):
                topic.append(b"x" * 60, sync=True)
        assert told.one("directory_opened")["directory"] == str(tmp_path / "data")
        opened = told.one("log_opened", topic="shop/orders", start_offset=0, next_offset=0)
        assert opened["levelname"] == "INFO"
        assert opened["seconds"] >= 0
        first = told.one("file_rotated", topic="shop/orders", first_offset=0)
        assert 0 < first["next_offset"] < 5
        assert first["bytes"] >= 60
        told.clear()
        newest = sorted((tmp_path / "data/shop/orders").glob("wal.*.log"))[-1]
        with newest.open("ab") as file:
            file.write(b"half a frame")
        with tidelog.open(tmp_path / "data") as log:
            assert log.topic("shop/orders").next_offset == 5
        told.one("log_recovered", topic="shop/orders", cut_bytes=12, next_offset=5, file=newest.name)
        told.one("log_opened", topic="shop/orders", next_offset=5)

    def test_nothing_is_logged_for_a_message(self, tmp_path: Path, told: Told) -> None:
        """A thousand appends and reads are no event."""
        with tidelog.open(tmp_path) as log:
            topic = log.topic("shop/orders")
            told.clear()
            for _ in range(1000):
                topic.append(b"value")
            assert len(list(topic.read(0, follow=False))) == 1000
            assert told._caplog.records == []

    def test_shipping_retention_and_takeover(self, tmp_path: Path, told: Told) -> None:
        """Each object is told, what leaves the disk and the store, and who owns the topic from when on."""
        place: dict[str, Any] = {"store": f"file://{tmp_path}/store", "metadata": "bucket"}
        with (
            tidelog.open(tmp_path / "one", rotate_max_bytes=200, **place) as log,
            tidelog.open(tmp_path / "two", **place) as other,
        ):
            topic = log.topic("shop/orders", local_retention_bytes=1)
            told.one("claimed", topic="shop/orders", epoch=1, node=log._info.node)
            for number in range(3):
                topic.append(b"x" * 150, sync=True)
                topic.ship()
                shipped = told.one("object_shipped", topic="shop/orders", first_offset=number, next_offset=number + 1)
                assert shipped["bytes"] > 0
                assert shipped["epoch"] == 1
            topic.prune()
            assert told.named("local_pruned")[-1]["bytes"] > 0
            taken = other.topic("shop/orders", take_over=True, retention_bytes=1)
            told.one("taken_over", topic="shop/orders", epoch=2, node=other._info.node, from_node=log._info.node)
            with pytest.raises(tidelog.FencedError):
                topic.ship()
            told.one("fenced", topic="shop/orders", epoch=1)
            taken.prune()
            assert told.one("cold_deleted", topic="shop/orders", objects=3)["start_offset"] == 3

    def test_merged_objects(self, tmp_path: Path, told: Told) -> None:
        """What a compaction has put together is told when it counts."""
        shop = Shop(tmp_path)
        shop.ship(lambda topic: topic.append(b"1", key=b"a"), lambda topic: topic.append(b"2", key=b"a"))
        shop.remove([0])
        merged = told.one("objects_merged", topic=NAME)
        assert merged["replaced_objects"] >= 1
        assert merged["bytes"] > 0


def test_engine(tmp_path: Path, told: Told) -> None:
    """Opening, checkpoints, shipped objects, compactions and collected garbage of an engine, by its directory."""
    place, engine_place = tmp_path / "engine", str(tmp_path / "engine")
    with tidelog.open_engine(place, store=f"file://{tmp_path}/store") as engine:
        told.one("engine_opened", engine=engine_place, seq=0)
        told.one("claimed", engine=engine_place)
        engine.apply(1, tidelog.CreateBucket("photos"))
        for seq in range(2, 6):
            engine.apply(seq, tidelog.PutObject("photos", "cat", b"x" * seq))
            engine.update_low_water_mark(seq)
            engine.ship()
        assert all(one["bytes"] > 0 for one in told.named("object_shipped"))
        assert len(told.named("object_shipped")) >= 4
        engine.create_checkpoint()
        assert told.named("checkpoint")[-1]["seq"] == 5
        engine.compact()
        assert told.one("log_compacted", engine=engine_place)["new_objects"] >= 0
        engine.compact_index()
        told.one("index_compacted", engine=engine_place)
        engine.collect_garbage(horizon=5)
        assert told.one("garbage_collected", engine=engine_place)["versions"] == 3


class TestJobs:
    """Every job tells its begin and its end."""

    def test_outcomes(self, told: Told) -> None:
        """What it found wrong is counted, and an error is named by its class."""

        @logged
        def verify(root: Root, problems: int) -> JobReport:
            if problems < 0:
                raise ConfigError("wrong")
            return JobReport(job="verify", findings=(Finding(subject="a/b", message="lost"),) * problems)

        root = Root("/data", settings={"store_secret_access_key": SECRET})
        verify(root, 0)
        told.one("job_started", job="verify", root="/data")
        told.one("job_ended", job="verify", outcome="done", problems=0)
        verify(root, 2)
        told.one("job_ended", job="verify", outcome="problems", problems=2)
        with pytest.raises(ConfigError):
            verify(root, -1)
        told.one("job_ended", job="verify", outcome="failed", error="ConfigError")
        assert SECRET not in told._caplog.text

    def test_all_jobs_do(self) -> None:
        """Whatever in the pipeline returns a report and says how far it is, is a job, and marked as one that tells."""
        jobs, silent = [], []
        for path in sorted(PIPELINE.rglob("*.py")):
            for node in ast.parse(path.read_text("utf-8")).body:
                if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                    continue
                named = {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
                if {"spark", "root", "on_progress"} <= named and "Report" in ast.unparse(node.returns or node):
                    jobs.append(node.name)
                    silent += [node.name] * ("logged" not in map(ast.unparse, node.decorator_list))
        assert len(jobs) == 20
        assert silent == []


class TestOutput:
    """TIDELOG_LOG turns on output to stderr."""

    def test_quiet_by_default(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Nothing is written, and neither levels nor handlers are touched."""
        with tidelog.open(tmp_path) as log:
            log.topic("shop/orders").append(b"value", sync=True)
        logger = logging.getLogger("tidelog")
        assert (logger.handlers, logger.level, logger.propagate) == ([], logging.NOTSET, True)
        assert capsys.readouterr().err == ""

    @pytest.mark.parametrize("mode", ["info", "debug"])
    def test_readable_lines(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str
    ) -> None:
        """One line of key=value an event, once, however often something is opened."""
        monkeypatch.setenv("TIDELOG_LOG", mode)
        for _ in range(2):
            with tidelog.open(tmp_path / "two words") as log:
                log.topic("shop/orders")
        with tidelog.open_engine(tmp_path / "engine"):
            pass
        lines = capsys.readouterr().err.splitlines()
        assert sum(" event=directory_opened " in line for line in lines) == 2
        assert sum(" event=engine_opened " in line for line in lines) == 1
        assert all(line.startswith("time=2") and " level=info event=" in line for line in lines)
        assert any(f'directory="{tmp_path}/two words"' in line for line in lines)
        assert any("topic=shop/orders start_offset=0 next_offset=0" in line for line in lines)

    def test_json_lines(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Each line is an object with time, level and event; what is no event is one with a message."""
        monkeypatch.setenv("TIDELOG_LOG", "json")
        with tidelog.open(tmp_path, store=f"file://{tmp_path}/store", metadata="bucket") as log:
            log.topic("shop/orders").append(b"value")
            assert log.topic("shop/orders").ship() == 1
        logging.getLogger("tidelog.log").warning("two\nlines")
        lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
        assert all(one["time"].endswith("Z") and one["logger"].startswith("tidelog.") for one in lines)
        shipped = next(one for one in lines if one["event"] == "object_shipped")
        assert (shipped["level"], shipped["topic"], shipped["first_offset"]) == ("info", "shop/orders", 0)
        assert {"level": "warning", "event": "message", "message": "two\nlines"}.items() <= lines[-1].items()

    def test_warnings_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Events are left out then."""
        monkeypatch.setenv("TIDELOG_LOG", "warning")
        with tidelog.open(tmp_path):
            logging.getLogger("tidelog.log").warning("the disk is slow")
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith('level=warning logger=tidelog.log message="the disk is slow"')

    def test_an_unknown_value_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The error says which ones there are; nothing is opened."""
        monkeypatch.setenv("TIDELOG_LOG", "loud")
        with pytest.raises(ConfigError, match=r"TIDELOG_LOG is 'loud'\. It is one of warning, info, debug, json"):
            tidelog.open(tmp_path / "data")
        assert not (tmp_path / "data").exists()

    def test_an_applications_own_level_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Who wants more gets more."""
        monkeypatch.setenv("TIDELOG_LOG", "warning")
        logger = logging.getLogger("tidelog")
        logger.setLevel(logging.DEBUG)
        events.turn_on_output()
        assert logger.level == logging.DEBUG

    def test_no_secret_is_in_any_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Credentials of a store are settings, and no event has them."""
        monkeypatch.setenv("TIDELOG_LOG", "json")
        keys: dict[str, Any] = {"store_access_key_id": "AKIAEXAMPLE", "store_secret_access_key": SECRET}
        place: dict[str, Any] = {"store": "s3://bucket", "store_endpoint": "http://127.0.0.1:9", "store_max_retries": 0}
        with pytest.raises(tidelog.StoreUnavailableError):
            tidelog.open(tmp_path / "a", **place, **keys)
        with tidelog.open(tmp_path / "b") as log:
            log.topic("shop/orders").append(b"private", key=b"customer", sync=True)
        text = capsys.readouterr().err
        assert "directory_opened" in text
        assert not any(word in text for word in (SECRET, "AKIAEXAMPLE", "private", "customer"))
