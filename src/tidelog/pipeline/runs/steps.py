"""The kinds of steps: what each of them does on a place, by the job of that name.

Invariants
- Options of a step are those of its job, by the same names; one that the job does not know is refused before Spark is
  started, with the nearest name.
- A function that cannot be imported and a place that is not there are mistakes of the file, told before the first step.
  A place that nobody can look at now, or that a function of the user's may make before it is used, is none.
- A step changes what its command changes. A step `gc` removes what it finds, unless it has the option `is_dry_run`.
- A function of the user's gets names under which its writes to topics are stored once, however often the run is killed:
  `options(**context.once)` of a write in batches.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import msgspec

from tidelog.errors import ConfigError, InputError, NotFoundError, TidelogError
from tidelog.pipeline.address import EngineRoot, Root
from tidelog.pipeline.jobs.job import JobReport, OnProgress
from tidelog.pipeline.jobs.tally import notes_on
from tidelog.pipeline.runs.definition import Definition, Place, Step
from tidelog.pipeline.tables.commits import Values
from tidelog.units import parse_bytes, parse_seconds

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Options = TypeVar("Options", bound=msgspec.Struct)
_TOPIC_IN_NAME = "{topic}"


class RunContext(NamedTuple):
    """What a function of the user's is told: which run and step it is, where it works, and its options.

    `root` is a `Root` with `topics`, or an `EngineRoot` without.
    """

    pipeline: str
    run: str
    step: str
    place: str
    root: Root | EngineRoot
    topics: tuple[str, ...]
    options: dict[str, Any]
    version: int
    on_progress: OnProgress

    @property
    def once(self) -> dict[str, str]:
        """Options for a batch write to a topic, which is then stored once in this run."""
        return {"txnAppId": f"pipeline-{self.pipeline}-{self.step}-{self.place}", "txnVersion": str(self.version)}


class Request(NamedTuple):
    """One step on one place, for a table on one topic."""

    definition: Definition
    step: Step
    place_name: str
    topic: str | None
    run: str
    began_us: int
    session: Callable[[], SparkSession]
    on_progress: OnProgress

    @property
    def spark(self) -> SparkSession:
        """The session of the run, which the first step that needs it starts."""
        return self.session()

    @property
    def place(self) -> Place:
        return self.definition.places[self.place_name]

    @property
    def root(self) -> Root:
        return self.definition.root_of(self.place)

    @property
    def engine(self) -> EngineRoot:
        return self.definition.engine_of(self.place)

    @property
    def topics(self) -> list[str] | None:
        """The topics of the place: None for all of them."""
        return topics_of(self.definition, self.place)


def topics_of(definition: Definition, place: Place) -> list[str] | None:
    """The topics of a place: those that are named, or that its pattern matches now; None for all."""
    if place.pattern is None:
        return place.topics or None
    with definition.root_of(place).open() as log:
        return [str(name) for name in log.topics() if re.fullmatch(place.pattern, str(name))]


def all_topics_of(definition: Definition, place: Place) -> list[str]:
    """The same, each by its name."""
    found = topics_of(definition, place)
    if found is not None:
        return found
    with definition.root_of(place).open() as log:
        return [str(name) for name in log.topics()]


def do(request: Request) -> JobReport:
    """Takes the step."""
    kinds = _ENGINE_JOBS if request.place.is_engine else _TOPIC_JOBS
    return kinds[request.step.do](request)


def needs_spark(step: Step) -> bool:
    """Whether a step is taken in Spark; a page is made without it unless it is to count messages."""
    return step.do != "report" or bool(step.options.get("exact"))


def check_options(definition: Definition) -> None:
    """ConfigError for options that a job does not know, before anything is started."""
    for step in definition.steps:
        for name in definition.places_of(step):
            kind = _options_type(step, definition.places[name])
            if kind is not None:
                options_as(kind, step)
        if step.do == "table":
            places = [definition.places[name] for name in definition.places_of(step)]
            several = len(places) > 1 or any(len(place.topics) != 1 for place in places)
            if several and _TOPIC_IN_NAME not in str(step.options.get("to", "")):
                hint = f'For example to = "./tables/{_TOPIC_IN_NAME}"'
                raise ConfigError(f"the step {step.name}: several topics need tables of their own", hint=hint)


def check_ready(definition: Definition) -> None:
    """ConfigError for what no run could do: a function that is not there, a place that no step before may make.

    It imports the modules of functions. What cannot be looked at now is for the step to say, in its turn.
    """
    check_options(definition)
    may_be_made = False
    checked: set[str] = set()
    for step in definition.ordered():
        if step.do == "python":
            find_function(step.function or "", definition.directory)
            may_be_made = True
        for name in definition.places_of(step):
            if name not in checked:
                checked.add(name)
                _check_place(definition, name, must_be_there=not may_be_made)


def _check_place(definition: Definition, name: str, *, must_be_there: bool) -> None:
    place = definition.places[name]
    try:
        if not place.is_engine:
            root = definition.root_of(place)
            if must_be_there and not root.is_there:
                hint = f"Set root in [places.{name}] to a log directory or a store; paths are relative to the file"
                raise NotFoundError(f"there is no log directory or store in {root.location}", hint=hint)
        elif must_be_there:
            definition.engine_of(place)
    except InputError as error:
        raise ConfigError(f"the place {name}: {error.message}", hint=error.hint) from error
    except TidelogError:
        return  # a store out of reach, or damage: it fails its own steps alone


# Options


class TableStepOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Of a table: where it is, and how messages become rows."""

    to: str
    catalog: str | None = None
    catalog_properties: dict[str, str] = {}
    values: Values = "raw"
    schema: dict[str, Any] | None = None
    avro_schema: str | None = None
    with_headers: bool = False
    fail_on_data_loss: bool = True


class GcStepOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Of a collection of garbage."""

    grace_seconds: Annotated[float, msgspec.Meta(ge=0)] = 3600.0
    is_dry_run: bool = False


class EngineGcStepOptions(GcStepOptions, frozen=True, kw_only=True):
    """Of one in an engine's store."""

    keep_from: int | None = None


class ReportStepOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Of a page with plots."""

    to: str
    exact: bool = False
    max_details: int = 100


class VerifyEngineStepOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Of a verification of an engine."""

    replicas: list[str] | None = None
    digest: str | None = None


class DigestStepOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Of a digest."""

    from_log: bool = False


class NoOptions(msgspec.Struct, frozen=True):
    """Of what has none."""


def _options_type(step: Step, place: Place) -> type[msgspec.Struct] | None:
    if step.do == "python":
        return None
    if step.do == "compact":
        from tidelog.pipeline.jobs.compact_topic import CompactOptions
        from tidelog.pipeline.jobs.engine.compact_steps import CompactEngineOptions

        return CompactEngineOptions if place.is_engine else CompactOptions
    if place.is_engine and step.do in _ENGINE_OPTIONS:
        return _ENGINE_OPTIONS[step.do]
    return _OPTIONS.get(step.do, NoOptions)


_OPTIONS: dict[str, type[msgspec.Struct]] = {
    "table": TableStepOptions,
    "gc": GcStepOptions,
    "report": ReportStepOptions,
}
_ENGINE_OPTIONS: dict[str, type[msgspec.Struct]] = {
    "gc": EngineGcStepOptions,
    "verify": VerifyEngineStepOptions,
    "digest": DigestStepOptions,
}


def options_as(kind: type[Options], step: Step) -> Options:
    """The options of a step as those of its job. Sizes and times may be text: `256MiB`, `1h`."""
    known = kind.__struct_fields__
    for name in step.options:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(known) or 'none'}"
            raise ConfigError(f"the step {step.name}: {step.do} has no option {name}", hint=hint)
    given = {name: _in_units(name, value) for name, value in step.options.items()}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the step {step.name}: its options are not understood: {error}") from None


def _in_units(name: str, value: object) -> object:
    if isinstance(value, str) and name.endswith("_bytes"):
        found = parse_bytes(value)
        return value if found is None else found
    if isinstance(value, str) and name.endswith("_seconds"):
        found = parse_seconds(value)
        return value if found is None else float(found)
    return value


# Jobs over topics


def _ship(request: Request) -> JobReport:
    from tidelog.pipeline.jobs.ship import ship

    return ship(request.spark, request.root, request.topics, request.on_progress)


def _verify(request: Request) -> JobReport:
    from tidelog.pipeline.jobs.verify import verify

    return verify(request.spark, request.root, request.topics, request.on_progress)


def _compact(request: Request) -> JobReport:
    from tidelog.pipeline.jobs.compact_topic import CompactOptions, compact

    options = options_as(CompactOptions, request.step)
    return compact(request.spark, request.root, request.topics, options, on_progress=request.on_progress)


def _table(request: Request) -> JobReport:
    from tidelog.pipeline.tables.table import TableOptions, table
    from tidelog.pipeline.tables.targets import table_target

    given, topic = options_as(TableStepOptions, request.step), request.topic
    if topic is None:
        return _tables(request)
    to = given.to.replace(_TOPIC_IN_NAME, topic.replace("/", "." if given.catalog else "/"))
    where = to if given.catalog is not None else request.definition.path(to)
    target = table_target(request.root, where, given.catalog, given.catalog_properties)
    names = [name for name in TableOptions.__struct_fields__ if name in TableStepOptions.__struct_fields__]
    options = msgspec.convert({name: getattr(given, name) for name in names}, TableOptions)
    return table(request.spark, request.root, topic, target, options, request.on_progress)


def _tables(request: Request) -> JobReport:
    """Tables of all topics that are there now: none was known when the run began."""
    names = all_topics_of(request.definition, request.place)
    made = [_table(request._replace(topic=name)) for name in names]
    return JobReport(
        job="table",
        reconciliations=tuple(one for each in made for one in each.reconciliations),
        findings=tuple(one for each in made for one in each.findings),
        notes=(*notes_on(names, request.root.location), *(one for each in made for one in each.notes)),
    )


def _gc(request: Request) -> JobReport:
    from tidelog.pipeline.jobs.gc import apply_gc, plan_gc

    options, root = options_as(GcStepOptions, request.step), request.root
    make = partial(plan_gc, request.spark, root, request.topics, grace_seconds=options.grace_seconds)
    plan, report = make(on_progress=request.on_progress)
    if options.is_dry_run or not plan.removable:
        return report
    return apply_gc(request.spark, root, plan, on_progress=request.on_progress)


def _report(request: Request) -> JobReport:
    from tidelog.pipeline.report.report import make_report

    options = options_as(ReportStepOptions, request.step)
    return make_report(
        request.root,
        request.definition.path(options.to),
        request.topics,
        spark=request.spark if options.exact else None,
        exact=options.exact,
        max_details=options.max_details,
        on_progress=request.on_progress,
    )


# Jobs over engines


def _verify_engine(request: Request) -> JobReport:
    from tidelog.pipeline.jobs.engine.verify import verify_engine

    given = options_as(VerifyEngineStepOptions, request.step)
    return verify_engine(
        request.spark,
        request.engine,
        digest=given.digest,
        replicas=given.replicas,
        on_progress=request.on_progress,
    )


def _compact_engine(request: Request) -> JobReport:
    from tidelog.pipeline.jobs.engine.compact import compact_engine
    from tidelog.pipeline.jobs.engine.compact_steps import CompactEngineOptions

    options = options_as(CompactEngineOptions, request.step)
    return compact_engine(request.spark, request.engine, options, on_progress=request.on_progress)


def _checkpoint(request: Request) -> JobReport:
    from tidelog.pipeline.jobs.engine.snapshot import checkpoint_engine

    return checkpoint_engine(request.spark, request.engine, on_progress=request.on_progress)


def _gc_engine(request: Request) -> JobReport:
    from tidelog.pipeline.jobs.gc import apply_engine_gc, plan_engine_gc

    options, engine = options_as(EngineGcStepOptions, request.step), request.engine
    plan, report = plan_engine_gc(
        request.spark,
        engine,
        keep_from=options.keep_from,
        grace_seconds=options.grace_seconds,
        on_progress=request.on_progress,
    )
    if options.is_dry_run or not plan.found:
        return report
    return apply_engine_gc(request.spark, engine, plan, on_progress=request.on_progress)


def _digest(request: Request) -> JobReport:
    from tidelog.pipeline.jobs.engine.digest import digest_engine

    options = options_as(DigestStepOptions, request.step)
    return digest_engine(request.spark, request.engine, from_log=options.from_log, on_progress=request.on_progress)


# A function of the user's


def _python(request: Request) -> JobReport:
    step, place = request.step, request.place
    function = find_function(step.function or "", request.definition.directory)
    root: Root | EngineRoot = request.engine if place.is_engine else request.root
    topics = () if place.is_engine else tuple(all_topics_of(request.definition, place))
    context = RunContext(
        *(request.definition.name, request.run, step.name, request.place_name, root, topics, dict(step.options)),
        *(request.began_us, request.on_progress),
    )
    try:
        made = function(request.spark, context)
    except SystemExit as error:  # it must not end the run, nor say with 0 that all is well
        raise RuntimeError(f"SystemExit: {error}") from error
    if isinstance(made, JobReport):
        return made
    if made is None or isinstance(made, Mapping):
        return JobReport(job=step.name, notes=tuple(f"{name}: {value}" for name, value in (made or {}).items()))
    raise InputError(
        f"{step.function} returned {type(made).__name__}", hint="A JobReport, a mapping of figures, or nothing"
    )


def find_function(name: str, directory: str) -> Callable[..., object]:
    """The function of a name such as `my_jobs.cleaning:run`; modules beside the file of the pipeline are found."""
    module_name, _, function_name = name.partition(":")
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        found = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        hint = "Install its module, or put it beside the file of the pipeline"
        raise ConfigError(f"there is no function {name}: {error}", hint=hint) from error
    except (Exception, SystemExit) as error:  # the module is the user's, and may raise anything, or be a script
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"the module of {name} cannot be imported: {what}", hint="Mend the module") from error
    if not callable(found):
        raise ConfigError(f"{name} is no function", hint="Name a function of two arguments: the session and a context")
    return found  # type: ignore[no-any-return]


_TOPIC_JOBS: dict[str, Callable[[Request], JobReport]] = {
    "ship": _ship,
    "verify": _verify,
    "compact": _compact,
    "table": _table,
    "gc": _gc,
    "report": _report,
    "python": _python,
}
_ENGINE_JOBS: dict[str, Callable[[Request], JobReport]] = {
    "verify": _verify_engine,
    "compact": _compact_engine,
    "checkpoint": _checkpoint,
    "gc": _gc_engine,
    "digest": _digest,
    "python": _python,
}
