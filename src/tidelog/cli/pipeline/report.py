"""`tidelog pipeline report` and `cost`: a page with plots of all topics, and the cost of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidelog.cli.output import Output, counted
from tidelog.cli.pipeline.job import (
    EngineNameOption,
    MasterOption,
    OnlyEngineOption,
    RootOption,
    engine_root,
    job_root,
    progress_bars,
    run_engine_job,
    run_job,
    tell,
)
from tidelog.cli.session import Session
from tidelog.pipeline.address import EngineRoot
from tidelog.units import human_bytes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.pipeline.cost.cost import CostReport, StoreCost
    from tidelog.pipeline.cost.model import PriceList, Requests
    from tidelog.pipeline.jobs.job import OnProgress
    from tidelog.pipeline.report.report import ReportReport


_DEFAULT_PAGE = Path("tidelog-report.html")


def report(
    session: Session,
    topics: Annotated[
        list[str] | None, typer.Argument(metavar="TOPIC...", help="namespace/name [default: all].")
    ] = None,
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="Where the page goes.")] = _DEFAULT_PAGE,
    exact: Annotated[bool, typer.Option("--exact", help="Count every message over time, with Spark.")] = False,
    details: Annotated[int, typer.Option("--details", min=0, help="How many topics get charts of their own.")] = 100,
    root: RootOption = None,
    master: MasterOption = None,
) -> None:
    """Writes a page with plots. Messages and bytes over time, sizes, hot and cold, subscription lag.

    One file that needs nothing else, for a browser or an attachment. It is made from descriptors and files, in a moment
    and without Spark; --exact has Spark count every message over time, and --master looks at topics on its workers.
    """
    from tidelog.pipeline.report.report import make_report

    if exact or master is not None:
        run_job(
            session,
            "report",
            root,
            master,
            lambda spark, place, on_progress: make_report(
                place, to, topics or None, spark=spark, exact=exact, max_details=details, on_progress=on_progress
            ),
            _show,
        )
        return
    with progress_bars(session.output) as on_progress:
        made = make_report(job_root(session, root), to, topics or None, max_details=details, on_progress=on_progress)
    tell(session, made, _show)


def _show(output: Output, made: ReportReport) -> None:
    output.line(f"{made.page}: {counted(made.topics, 'topic')}, {counted(made.messages, 'message')}")
    output.note(f"{human_bytes(made.cold_bytes)} in the store, {human_bytes(made.hot_bytes)} on this disk")


# `tidelog pipeline cost`: the cost of an engine in its store and its replicas, now and after compaction.


_KINDS = ("kind", "objects", "bytes")
_COSTS = (
    "store",
    "when",
    "objects",
    "bytes",
    "storage_month",
    "restore_requests",
    "restore_price",
    "million_reads_requests",
    "million_reads_price",
    "shipping_month_requests",
    "shipping_month_price",
)
_NARROWER = ("when", "objects", "bytes", "storage_month", "restore_requests", "million_reads_price")


def cost(
    session: Session,
    engine: OnlyEngineOption = None,
    engine_name: EngineNameOption = None,
    price_storage: Annotated[
        float, typer.Option("--price-storage", min=0, help="Of a gigabyte that is kept for a month.")
    ] = 0.023,
    price_put: Annotated[
        float, typer.Option("--price-put", min=0, help="Of a thousand requests that write or list.")
    ] = 0.005,
    price_get: Annotated[float, typer.Option("--price-get", min=0, help="Of a thousand requests that read.")] = 0.0004,
    price_transfer: Annotated[
        float, typer.Option("--price-transfer", min=0, help="Of a gigabyte that leaves the store.")
    ] = 0.0,
    prices: Annotated[
        Path | None, typer.Option("--prices", metavar="FILE", help="Prices in TOML, also of single stores by URL.")
    ] = None,
    replica: Annotated[
        list[str] | None,
        typer.Option("--replica", metavar="URL", help="Count this replica as well [default: as its settings]."),
    ] = None,
    master: MasterOption = None,
) -> None:
    """Shows what an engine costs. Objects and bytes of each kind, requests and their prices, in each of its stores.

    As it is now, and after `tidelog pipeline compact --engine` and `gc --engine`: counted where there is a compaction,
    estimated from what is alive where there is none yet. Requests are those of a restore, of a million reads of values
    that are in the store alone, and of shipping for a month at the present rate. Nothing is changed.
    """
    from tidelog.pipeline.cost.cost import engine_cost
    from tidelog.pipeline.cost.model import PriceList, Prices, read_prices

    given = Prices(storage=price_storage, put=price_put, get=price_get, transfer=price_transfer)
    listed: PriceList = PriceList(given) if prices is None else read_prices(prices, given)

    def work(spark: SparkSession, root: EngineRoot, on_progress: OnProgress) -> CostReport:
        return engine_cost(spark, root, listed, replicas=replica, on_progress=on_progress)

    run_engine_job(session, "cost", engine_root(session, engine, engine_name), master, work, _show_cost)


def _show_cost(output: Output, report: CostReport) -> None:
    for store in report.stores:
        kinds = [{"kind": one.kind, "objects": one.objects, "bytes": one.bytes} for one in store.kinds]
        output.note(store.url)
        output.table(_KINDS, kinds)
    costs = [row for store in report.stores for row in _rows(store)]
    output.table(_COSTS, costs, narrower=[_COSTS[1:], _NARROWER])


def _rows(store: StoreCost) -> list[dict[str, object]]:
    return [
        {
            "store": store.url,
            "when": f"{one.name} (estimated)" if one.is_estimated else one.name,
            "objects": one.objects,
            "bytes": one.bytes,
            "storage_month": _price(one.storage_month),
            "restore_requests": _requests(one.restore),
            "restore_price": _price(one.restore.price),
            "million_reads_requests": _requests(one.cold_reads),
            "million_reads_price": _price(one.cold_reads.price),
            "shipping_month_requests": _requests(one.shipping_month),
            "shipping_month_price": None if one.shipping_month is None else _price(one.shipping_month.price),
        }
        for one in store.scenarios
    ]


def _requests(requests: Requests | None) -> int | None:
    return None if requests is None else requests.puts + requests.gets


def _price(price: float) -> str:
    """Small engines cost fractions of a cent, which is more than nothing."""
    return f"{price:,.2f}" if price >= 0.1 or not price else f"{price:.6f}"
