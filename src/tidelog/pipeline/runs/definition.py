"""`pipeline.toml`: which places there are, and which steps are taken on them, in which order and how often.

    name = "nightly"
    keep_reports = 30

    [places.shop]                                  # topics: all, those that are named, or those that a pattern matches
    root = "s3://bucket/prefix"
    pattern = "shop/.*"

    [places.objects]                               # an engine
    engine = "s3://bucket/engine"

    [[steps]]
    do = "compact"                                 # on all places that it can be done on
    every = "1h"

    [[steps]]
    name = "orders"
    do = "table"
    on = "shop"
    after = ["compact"]
    options = { to = "./tables/{topic}", values = "json" }

Invariants
- A definition is checked whole before anything runs: kinds of steps, their places, their order. What is not known is an
  error that names the nearest.
- Paths in it are relative to the file, wherever the command is started.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Literal

import msgspec

from tidelog.errors import ConfigError, InputError, NotFoundError
from tidelog.fields import nearest
from tidelog.files import explained
from tidelog.pipeline.address import EngineRoot, Root, find_engine, find_root
from tidelog.store.keys import check_part
from tidelog.topics.names import parse_topic_name
from tidelog.units import parse_seconds

Kind = Literal["ship", "verify", "compact", "table", "checkpoint", "gc", "digest", "report", "python"]
OF_TOPICS: tuple[Kind, ...] = ("ship", "verify", "compact", "table", "gc", "report", "python")
OF_ENGINES: tuple[Kind, ...] = ("verify", "compact", "checkpoint", "gc", "digest", "python")
DEFAULT_KEPT_REPORTS = 30
_BESIDE_SETTINGS = ("dir", "store", "metadata", "location", "name")  # the place says them itself
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class SparkSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where Spark runs, and its settings; the command line wins."""

    master: str | None = None
    settings: dict[str, str | int | float | bool] = {}


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Topics below a root, or an engine, and the settings that the place is reached with."""

    root: str | None = None
    metadata: str | None = None
    topics: list[str] = []
    pattern: str | None = None
    engine: str | None = None
    engine_name: str | None = None
    settings: dict[str, str | int | float | bool] = {}

    @property
    def is_engine(self) -> bool:
        return self.engine is not None


class Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that is done on places. Without `every` it is done in each run."""

    do: Kind
    name: str = ""
    on: str | list[str] | None = None
    after: str | list[str] = []
    every: str | int | float | None = None
    retries: Literal[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10] = 2
    function: str | None = None
    options: dict[str, Any] = {}

    @property
    def every_seconds(self) -> float | None:
        """How much time is between two of them; None: none."""
        return None if self.every is None else parse_seconds(str(self.every))


class Definition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole pipeline. `directory` is that of its file."""

    name: str
    places: dict[str, Place]
    steps: list[Step]
    state: str | None = None
    keep_reports: int = DEFAULT_KEPT_REPORTS
    spark: SparkSettings = SparkSettings()
    directory: str = ""

    def step(self, name: str) -> Step | None:
        return next((one for one in self.steps if one.name == name), None)

    def ordered(self) -> list[Step]:
        """The steps, each behind those that it comes after; otherwise as they are declared."""
        sorter = TopologicalSorter({one.name: _listed(one.after) for one in self.steps})
        sorter.prepare()
        order, found = [one.name for one in self.steps], []
        while sorter.is_active():
            ready = sorted(sorter.get_ready(), key=order.index)
            found += ready
            sorter.done(*ready)
        return [one for name in found if (one := self.step(name)) is not None]

    def places_of(self, step: Step) -> list[str]:
        """The places that a step is taken on: those that are named, or all that it can be done on."""
        if step.on is not None:
            return _listed(step.on)
        return [name for name, place in self.places.items() if _fits(step.do, place)]

    def root_of(self, place: Place) -> Root:
        """The address of topics."""
        return find_root(self.path(place.root or ""), place.metadata, **_texts(place.settings))

    def engine_of(self, place: Place) -> EngineRoot:
        return find_engine(self.path(place.engine or ""), place.engine_name, **_texts(place.settings))

    def state_root(self) -> Root:
        """Where the state of the pipeline and its reports are: as it says, or with the first place."""
        first = next(iter(self.places.values()))
        if self.state is not None:
            return find_root(self.path(self.state), **_texts(first.settings))
        if first.is_engine:
            return find_root(self.engine_of(first).store_url, **_texts(first.settings))
        return self.root_of(first)

    def path(self, text: str) -> str:
        """A path as the file means it; a URL as it is."""
        return text if "://" in text else os.path.join(self.directory, os.path.expanduser(text))


def read_definition(path: str | os.PathLike[str]) -> Definition:
    """The pipeline that a file declares; ConfigError says what is wrong in it."""
    file = Path(path)
    if not file.is_file():
        raise NotFoundError(
            "there is no such file", path=file, operation="read the pipeline", hint="Name pipeline.toml"
        )
    with explained("read the pipeline", file):
        data = file.read_bytes()
    try:
        document = tomllib.loads(data.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"this is not TOML: {error}", path=file) from error
    try:
        return parse_definition(document, file.absolute().parent)
    except ConfigError as error:
        raise ConfigError(error.message, path=file, hint=error.hint) from error


def parse_definition(document: Mapping[str, Any], directory: Path) -> Definition:
    """The same from a document that is read already."""
    try:
        found = msgspec.convert(dict(document), Definition)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the pipeline is not understood: {error}", hint=_hint_on(str(error))) from None
    steps = [msgspec.structs.replace(one, name=one.name or one.do) for one in found.steps]
    found = msgspec.structs.replace(found, steps=steps, directory=str(directory))
    _check(found)
    return found


def _check(found: Definition) -> None:
    if not found.places or not found.steps:
        raise ConfigError("a pipeline has places and steps", hint="[places.shop] and [[steps]]")
    if found.keep_reports < 1:
        raise ConfigError(f"keep_reports is {found.keep_reports}, and must be 1 or more")
    _check_names(found)
    for name, place in found.places.items():
        _check_place(name, place)
    for step in found.steps:
        _check_references(step, found)
        _check_step(step)
    try:
        found.ordered()
    except CycleError as error:
        raise ConfigError(f"steps wait for each other: {' after '.join(error.args[1])}") from None


def _check_names(found: Definition) -> None:
    names = [one.name for one in found.steps]
    for name in (found.name, *found.places, *names):
        try:
            check_part(name)
        except InputError as error:
            raise ConfigError(f"{name!r} is no name: {error.message}") from error
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two steps are called {twice}", hint="Give each its own name")


def _check_place(name: str, place: Place) -> None:
    if (place.root is None) == (place.engine is None):
        raise ConfigError(f"the place {name} has neither root nor engine, or both", hint="Topics have a root")
    if place.is_engine and (place.topics or place.pattern is not None or place.metadata is not None):
        raise ConfigError(f"the place {name} is an engine: topics, pattern and metadata are for a root")
    if place.topics and place.pattern is not None:
        raise ConfigError(f"the place {name} has topics and a pattern", hint="Leave one of them out")
    beside = next((one for one in place.settings if one in _BESIDE_SETTINGS), None)
    if beside is not None:
        hint = 'engine = "..." and engine_name' if place.is_engine else 'root = "..." and metadata = "..."'
        raise ConfigError(f"the place {name}: {beside} is none of its settings", hint=f"[places.{name}] has {hint}")
    try:
        re.compile(place.pattern or "")
        for topic in place.topics:
            parse_topic_name(topic)
    except (re.error, InputError) as error:
        raise ConfigError(f"the place {name}: {error}") from error


def _check_references(step: Step, found: Definition) -> None:
    for name in _listed(step.on) if step.on is not None else ():
        if name not in found.places:
            raise ConfigError(f"the step {step.name} is on {name}, which is no place", hint=_near(name, found.places))
        if not _fits(step.do, found.places[name]):
            kind = "an engine" if found.places[name].is_engine else "topics"
            raise ConfigError(f"the step {step.name} is on {name}, and {step.do} is not for {kind}")
    for name in _listed(step.after):
        if found.step(name) is None:
            known = [one.name for one in found.steps]
            raise ConfigError(f"the step {step.name} is after {name}, which is no step", hint=_near(name, known))
    if not found.places_of(step):
        raise ConfigError(f"the step {step.name} has no place: none is one for {step.do}")


def _check_step(step: Step) -> None:
    if step.every is not None and not step.every_seconds:
        raise ConfigError(f"the step {step.name} is every {step.every!r}", hint="A time such as 15m, 1h or 1d")
    if (step.do == "python") != (step.function is not None):
        raise ConfigError(f'the step {step.name}: function goes with do = "python", and python needs one')
    if step.function is not None and _FUNCTION.fullmatch(step.function) is None:
        raise ConfigError(f"{step.function!r} is no function", hint='Module and name: "my_jobs.cleaning:run"')


def _fits(kind: Kind, place: Place) -> bool:
    return kind in (OF_ENGINES if place.is_engine else OF_TOPICS)


def _listed(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _near(name: str, known: Sequence[str] | Mapping[str, object]) -> str:
    near = get_close_matches(name, list(known), n=1)
    return f"Did you mean {near[0]}?" if near else f"There are {', '.join(known)}"


def _hint_on(problem: str) -> str:
    """What is near the word that a problem quotes: a field, or a kind of step."""
    quoted = re.search(r"[`'](\w+)['`]", problem)
    known = {field for struct in (Definition, Place, Step, SparkSettings) for field in struct.__struct_fields__}
    near = nearest(quoted[1], known | {*OF_TOPICS, *OF_ENGINES}) if quoted else None
    is_unknown = problem.startswith(("Object contains unknown field", "Invalid enum value"))
    return near if near is not None and is_unknown else "docs/how-to/pipeline-run.md says what it has"


def _texts(settings: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in settings.items()}
