"""What an engine costs: the numbers are those of the store, and the requests those that the code makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession
from tests.engine.compacting import compact_by_hand
from tests.engine.stations import EngineNode, new_store, successor
from tests.pipeline.engines.computing import work_without_spark
from tests.pipeline.engines.eventful import SETTINGS, EventfulEngine

from tidelog.engine.sst.snapshot import StoredState
from tidelog.errors import ConfigError
from tidelog.pipeline.cost.cost import CostReport, engine_cost
from tidelog.pipeline.cost.model import (
    GIGABYTE,
    Holding,
    KindUse,
    LogObject,
    PriceList,
    Prices,
    Requests,
    checked_prices,
    cold_read_requests,
    priced,
    read_prices,
    restore_requests,
    scenario,
    uploads,
)

NO_SPARK: Any = None
DAY_US = 86_400 * 1_000_000


def log_object(number: int, size: int = 1000) -> LogObject:
    """One a day."""
    return LogObject(
        size=size,
        lsn=1 + 10 * number,
        next_lsn=11 + 10 * number,
        created_us=number * DAY_US,
        is_shipped=True,
        is_compressed=False,
    )


class TestModel:
    """Arithmetic over what was counted."""

    def test_prices_are_those_of_bills(self) -> None:
        """A gigabyte is a thousand million bytes, and requests are paid by the thousand."""
        prices = Prices(storage=0.02, put=0.005, get=0.0004, transfer=0.09)
        assert prices.for_month(3 * GIGABYTE) == pytest.approx(0.06)
        assert prices.for_requests(2000, 10_000, GIGABYTE) == pytest.approx(0.01 + 0.004 + 0.09)
        assert priced(Requests(puts=1000), prices).price == pytest.approx(0.005)

    def test_a_restore_fetches_the_state_and_the_log_behind_it(self) -> None:
        """Objects before the state are not fetched; large ones take a request for each 4 MiB."""
        log = tuple(log_object(number, 9 << 20) for number in range(4))
        holding = Holding(uses=(), log=log, state_bytes=1000, state_parts=(5 << 20,), state_lsn=31)
        found = restore_requests(holding)
        assert found.objects == 3
        before = restore_requests(Holding(uses=(), log=()))
        assert found.gets - before.gets == 2 + 3 + 1 + 1 + 2
        assert found.bytes == (9 << 20) + 1000 + (5 << 20)

    def test_reads_of_compacted_values_take_two_requests(self) -> None:
        """Those in the log take one."""
        holding = Holding(uses=(), log=(), values_in_log=300, values_compacted=100, value_bytes=400 * 1000)
        assert cold_read_requests(holding).gets == 750_000 + 2 * 250_000
        assert cold_read_requests(Holding(uses=(), log=())) == Requests()

    def test_shipping_goes_on_at_its_rate(self) -> None:
        """Eleven objects in ten days are thirty in a month, each with its descriptor and documents."""
        use = KindUse(kind="log", objects=11, bytes=11_000)
        found = scenario(
            "now", Holding(uses=(use,), log=tuple(map(log_object, range(11)))), Prices(), is_estimated=False
        )
        assert found.shipping_month is not None
        assert (found.shipping_month.objects, found.shipping_month.puts) == (30, 30 * 4)
        assert scenario("now", Holding(uses=(), log=()), Prices(), is_estimated=False).shipping_month is None

    def test_a_month_is_not_told_from_seconds(self) -> None:
        """Objects that were shipped by hand, one after the other, say nothing about the rate."""
        log = tuple(msgspec.structs.replace(log_object(number), created_us=number * 1_000_000) for number in range(4))
        assert scenario("now", Holding(uses=(), log=log), Prices(), is_estimated=False).shipping_month is None

    def test_large_objects_are_sent_in_parts(self) -> None:
        """With a request before them and one behind."""
        assert [uploads(1), uploads(8 << 20), uploads((8 << 20) + 1)] == [1, 1, 4]


class TestPrices:
    """Prices in a file."""

    def test_stores_have_prices_of_their_own(self, tmp_path: Path) -> None:
        """What a store does not say is as for all."""
        path = tmp_path / "prices.toml"
        path.write_text('get = 0.5\n[stores."s3://backup/engine/"]\nstorage = 0.01\n')
        listed = read_prices(path, Prices(transfer=0.09))
        assert listed.of("s3://other") == Prices(get=0.5, transfer=0.09)
        assert listed.of("s3://backup/engine") == Prices(get=0.5, transfer=0.09, storage=0.01)

    @pytest.mark.parametrize(
        "text", ["price = 1", "get = 'much'", "stores = 3", "get = -1", "get = [", "[stores.a]\nx = 1"]
    )
    def test_what_is_no_price_is_refused(self, tmp_path: Path, text: str) -> None:
        """By name, with the file."""
        path = tmp_path / "prices.toml"
        path.write_text(text)
        with pytest.raises(ConfigError):
            read_prices(path)

    def test_a_file_that_is_not_there_is_told(self, tmp_path: Path) -> None:
        """And a price that is no number is none."""
        with pytest.raises(ConfigError, match="the file of prices does not exist"):
            read_prices(tmp_path / "no.toml")
        with pytest.raises(ConfigError, match="0 or more"):
            checked_prices(Prices(get=float("nan")))


def stored_files(store: Path) -> list[Path]:
    """All objects of a store of files."""
    return [path for path in store.rglob("*") if path.is_file() and not path.name.startswith(".")]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EventfulEngine:
    """One that ships, and is closed."""
    history = EventfulEngine(tmp_path_factory.mktemp("cost"), "cost")
    for _ in range(4):
        history.node.apply(50)
        history.node.ship_all()
    history.close()
    return history


class TestEngine:
    """An engine before and after a compaction."""

    def test_everything_in_the_store_is_counted(self, engine: EventfulEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        """Once; and what would be after a compaction is an estimate."""
        work_without_spark(monkeypatch)
        report = engine_cost(NO_SPARK, engine.root, replicas=[engine.store.as_uri()])
        assert len(report.stores) == 2
        for store in report.stores:
            files = stored_files(engine.store)
            assert sum(one.objects for one in store.kinds) == len(files)
            assert sum(one.bytes for one in store.kinds) == sum(path.stat().st_size for path in files)
            assert [(one.name, one.is_estimated) for one in store.scenarios] == [
                ("now", False),
                ("after compaction and gc", True),
            ]
        assert report.notes

    def test_after_a_compaction_it_is_counted(self, engine: EventfulEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        """What it costs before, now and after; fewer objects, fewer requests for a restore, and nothing estimated."""
        work_without_spark(monkeypatch)
        estimated = engine_cost(NO_SPARK, engine.root).stores[0].scenarios[-1]
        compact_by_hand(engine.node.objects, rows_a_file=100_000, blob_file_bytes=1 << 20)
        report = engine_cost(NO_SPARK, engine.root)
        before, now, after = report.stores[0].scenarios
        assert [one.name for one in (before, now, after)] == ["before compaction", "now", "after compaction and gc"]
        assert not any(one.is_estimated for one in (before, now, after))
        assert after.objects < before.objects < now.objects
        assert after.restore.objects < before.restore.objects
        assert 0.3 < estimated.bytes / after.bytes < 3
        assert report.live.below_compaction == report.live.values
        assert report.live.values > 0


def test_spark_counts_the_same(tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """With real tasks; the report can be read back from JSON."""
    history = EventfulEngine(tmp_path, "spark cost")
    history.run(2, keeps_all=True)
    history.close()
    report = engine_cost(spark, history.root, PriceList(Prices(get=1.0)))
    assert msgspec.json.decode(msgspec.json.encode(report), type=CostReport) == report
    work_without_spark(monkeypatch)
    assert engine_cost(NO_SPARK, history.root, PriceList(Prices(get=1.0))).stores == report.stores


@pytest.mark.parametrize("is_compacted", [False, True])
def test_the_model_of_a_restore_is_near_what_a_restore_does(is_compacted: bool) -> None:
    """Requests that read, counted at the store, are within a third of those that the model tells."""
    store = new_store()
    node = EngineNode(store, name="a", **SETTINGS).open()
    node.apply(240)
    node.ship_all()
    node.engine.create_checkpoint()
    node.apply(200)
    node.ship_all()
    node.close()
    if is_compacted:
        compact_by_hand(store)
    state = node.view.manifest.checkpoints[-1]
    holding = Holding(
        uses=(),
        log=tuple(
            msgspec.structs.replace(log_object(0, one.size), lsn=one.start_offset, next_lsn=one.next_offset)
            for one in node.view.descriptors()
        ),
        state_bytes=state.size,
        state_parts=tuple(part.size for part in StoredState(store, state).parts()),
        state_lsn=state.lsn,
    )
    requests: list[str] = []
    other = successor(node, **SETTINGS)
    store.on_request = lambda operation, key: requests.append(operation)
    other.restore()
    found = sum(operation in ("get", "read_range", "head") for operation in requests)
    assert restore_requests(holding).gets == pytest.approx(found, rel=1 / 3)
