"""`pipeline.toml`: what it declares, and what is wrong in one, before anything runs."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import tidelog
from tidelog.cli.app import run as run_command
from tidelog.errors import ConfigError, NotFoundError
from tidelog.pipeline.runs.definition import Definition, parse_definition, read_definition
from tidelog.pipeline.runs.steps import check_options, check_ready

PLACES = """
name = "nightly"
[places.shop]
root = "./data"
pattern = "shop/.*"
[places.objects]
engine = "s3://bucket/engine"
"""


def _parsed(steps: str, places: str = PLACES) -> Definition:
    found = parse_definition(tomllib.loads(places + steps), Path("/etc/pipelines"))
    check_options(found)
    return found


def test_steps_are_taken_on_the_places_that_they_fit_in_the_order_that_they_ask_for() -> None:
    """A step without a place is taken on all that it can be done on; what comes after another is behind it."""
    found = _parsed("""
    [[steps]]
    name = "check"
    do = "verify"
    after = "compact"
    [[steps]]
    do = "checkpoint"
    every = "1h"
    [[steps]]
    do = "compact"
    options = { target_bytes = "64MiB" }
    on = ["shop"]
    """)
    assert [step.name for step in found.ordered()] == ["checkpoint", "compact", "check"]
    places = {step.name: found.places_of(step) for step in found.steps}
    assert places == {"check": ["shop", "objects"], "checkpoint": ["objects"], "compact": ["shop"]}
    assert found.step("checkpoint").every_seconds == 3600  # type: ignore[union-attr]


def test_paths_are_relative_to_the_file() -> None:
    """Cron starts commands in another directory than the one who wrote the file."""
    found = _parsed('[[steps]]\ndo = "gc"')
    assert found.root_of(found.places["shop"]).location == "/etc/pipelines/data"
    assert found.path("s3://bucket/x") == "s3://bucket/x"
    assert found.state_root().location == "/etc/pipelines/data"


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ('[[steps]]\ndo = "compct"', r"compct.*steps\[0\].do.*Did you mean compact"),
        ('[[steps]]\ndo = "gc"\nevry = "1h"', "evry.*Did you mean every"),
        ('[[steps]]\ndo = "gc"\nevery = "soon"', "is every 'soon'"),
        ('[[steps]]\ndo = "gc"\non = "shp"', "no place. Did you mean shop"),
        ('[[steps]]\ndo = "ship"\non = "objects"', "ship is not for an engine"),
        ('[[steps]]\ndo = "gc"\nafter = "verfy"\n[[steps]]\ndo = "verify"', "no step. Did you mean verify"),
        ('[[steps]]\ndo = "gc"\nafter = "verify"\n[[steps]]\ndo = "verify"\nafter = "gc"', "wait for each other"),
        ('[[steps]]\ndo = "gc"\n[[steps]]\ndo = "gc"', "two steps are called gc"),
        ('[[steps]]\ndo = "gc"\noptions = { grace_second = 5 }', "no option grace_second. Did you mean grace_seconds"),
        ('[[steps]]\ndo = "gc"\noptions = { grace_seconds = "x" }', "not understood"),
        ('[[steps]]\ndo = "gc"\noptions = { grace_seconds = -1 }', "not understood"),
        ('[[steps]]\ndo = "table"\noptions = { to = "./{topic}", values = "xml" }', "not understood"),
        ('[[steps]]\ndo = "python"', "python needs one"),
        ('[[steps]]\ndo = "python"\nfunction = "no function"', "is no function"),
        ('[[steps]]\ndo = "table"\noptions = { to = "./t" }', "tables of their own"),
        ("[[steps]]\ndo = 'gc'\nname = 'a/b'", "is no name"),
        ("steps = []", "has places and steps"),
    ],
)
def test_slips_are_named_before_anything_runs(steps: str, problem: str) -> None:
    """With the nearest name where there is one: a nightly run has nobody who watches it."""
    places = PLACES
    if steps == "steps = []":
        steps, places = "", steps + PLACES
    with pytest.raises(ConfigError, match=problem):
        _parsed(steps, places)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ('root = "x"', "store"),
        ('root = "x"', "metadata"),
        ('root = "x"', "location"),
        ('engine = "y"', "name"),
        ('engine = "y"', "store"),
    ],
)
def test_where_a_place_is_cannot_be_said_by_its_settings(place: str, name: str) -> None:
    """Read past, such a setting would leave the user with another place than the one that they name."""
    text = f'name = "n"\n[places.a]\n{place}\nsettings = {{ {name} = "bucket" }}\n'
    with pytest.raises(ConfigError, match=rf"{name} is none of its settings.*\[places.a\] has"):
        _parsed('[[steps]]\ndo = "verify"', text)


@pytest.mark.parametrize(
    "place",
    [
        "[places.a]",
        '[places.a]\nroot = "x"\nengine = "y"',
        '[places.a]\nengine = "y"\npattern = "x"',
        '[places.a]\nroot = "x"\ntopics = ["a/b"]\npattern = "x"',
        '[places.a]\nroot = "x"\npattern = "("',
    ],
)
def test_a_place_is_topics_or_an_engine(place: str) -> None:
    """Not both, not neither, and with a pattern that is one."""
    with pytest.raises(ConfigError, match="the place a"):
        _parsed('[[steps]]\ndo = "verify"', f'name = "n"\n{place}\n')


def test_the_file_is_named_in_errors(tmp_path: Path) -> None:
    """Of a dozen of them one wants to know which."""
    with pytest.raises(NotFoundError, match="no such file"):
        read_definition(tmp_path / "pipeline.toml")
    (tmp_path / "pipeline.toml").write_text("name =")
    with pytest.raises(ConfigError, match=r"not TOML.*pipeline\.toml"):
        read_definition(tmp_path / "pipeline.toml")
    (tmp_path / "pipeline.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"not TOML.*pipeline\.toml"):
        read_definition(tmp_path / "pipeline.toml")
    (tmp_path / "pipeline.toml").write_text(PLACES)
    with pytest.raises(ConfigError, match=r"steps.*pipeline\.toml"):
        read_definition(tmp_path / "pipeline.toml")


PYTHON_STEP = '[[steps]]\nname = "make"\ndo = "python"\non = "shop"\nfunction = "%s"\n'


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize(
    ("root", "function", "problem", "fix"),
    [
        ("data", "no_such_module:x", "there is no function no_such_module:x", "put it beside the file"),
        ("data", "ready_jobs:nothing", "there is no function ready_jobs:nothing", "put it beside the file"),
        ("data", "ready_jobs:NUMBER", "ready_jobs:NUMBER is no function", "Name a function"),
        ("data", "broken_jobs:make", "cannot be imported: SyntaxError", "Mend the module"),
        ("data", "script_jobs:make", "cannot be imported: SystemExit", "Mend the module"),
        ("dta", None, "the place shop: there is no log directory or store in", "Set root in [places.shop]"),
        ("file://PLACE/dta", None, "the place shop: there is no log directory or store in", "Set root in"),
    ],
)
def test_mistake_that_no_run_could_survive_ends_it_before_its_first_step(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    root: str,
    function: str | None,
    problem: str,
    fix: str,
) -> None:
    """Loses, without this: hours of the steps before, and a plan that is good until the night. Nothing is made."""
    tidelog.open(tmp_path / "data").close()
    (tmp_path / "ready_jobs.py").write_text("NUMBER = 1\n")
    (tmp_path / "broken_jobs.py").write_text("def make(:\n")
    (tmp_path / "script_jobs.py").write_text("import sys\nsys.exit(0)\n")
    step = '[[steps]]\ndo = "verify"\n' if function is None else PYTHON_STEP % function
    place = root.replace("PLACE", str(tmp_path))
    (tmp_path / "pipeline.toml").write_text(f'name = "n"\nplaces.shop.root = "{place}"\n{step}')
    assert run_command(["pipeline", command, str(tmp_path / "pipeline.toml")]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert problem in told
    assert fix in told
    assert not (tmp_path / "dta").exists()


def test_place_that_a_function_may_make_before_it_is_used_is_no_mistake(tmp_path: Path) -> None:
    """A function of the user's may write the first row, which makes the directory; a step before it may not."""
    (tmp_path / "making_jobs.py").write_text("def make(spark, context): ...\n")
    place, made = 'name = "n"\nplaces.shop.root = "new"\n', PYTHON_STEP % "making_jobs:make"
    check_ready(parse_definition(tomllib.loads(f'{place}{made}[[steps]]\ndo = "verify"\nafter = "make"'), tmp_path))
    with pytest.raises(ConfigError, match="the place shop"):
        check_ready(parse_definition(tomllib.loads(f'{place}[[steps]]\ndo = "verify"\n{made}'), tmp_path))


def test_place_that_cannot_be_looked_at_is_left_to_its_step(tmp_path: Path) -> None:
    """A store may be out of reach for a while, and the other steps are done; an engine's directory is looked at."""
    steps = '[[steps]]\ndo = "verify"\n'
    store = 'name = "n"\n[places.a]\nroot = "s3://no-such-bucket/x"\nsettings = { %s = "http://127.0.0.1:1" }\n'
    check_ready(parse_definition(tomllib.loads(store % "store_endpoint" + steps), tmp_path))
    with pytest.raises(ConfigError, match=r"the place a: stor_endpoint is not a setting.*store_endpoint"):
        check_ready(parse_definition(tomllib.loads(store % "stor_endpoint" + steps), tmp_path))
    with pytest.raises(ConfigError, match="the place a: there is no engine in"):
        check_ready(parse_definition(tomllib.loads(f'name = "n"\nplaces.a.engine = "x"\n{steps}'), tmp_path))
