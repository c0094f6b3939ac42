"""The console's files: how they are served, and what they may contain."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
from tests.service.http.serving import Served, serving

from tidelog.service.console.pages import console_routes

STATIC = Path(str(files("tidelog.service.console").joinpath("static")))
SCRIPTS = sorted(STATIC.glob("*.js"))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A server of a new directory."""
    with serving(tmp_path / "data") as running:
        yield running


def test_console_is_at_the_root_under_a_strict_policy(served: Served) -> None:
    """Scripts, styles and requests of this origin only; nothing inline, no frames, no forms."""
    page = served.call("GET", "/")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = dict(part.strip().partition(" ")[::2] for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert page.headers["x-content-type-options"] == "nosniff"
    for path in re.findall(r'(?:src|href)="(/[^"]*)"', page.body.decode()):
        assert served.call("GET", path).status == 200, path


def test_unchanged_file_is_not_sent_again(served: Served) -> None:
    """A browser that has a file asks whether it changed, and gets no body."""
    first = served.call("GET", "/console/main.js")
    again = served.call("GET", "/console/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status, again.body) == (304, b"")
    assert first.headers["cache-control"] == "no-cache"
    changed = served.call("GET", "/console/main.js", headers={"if-none-match": '"other"'})
    assert (changed.status, changed.body) == (200, first.body)


def test_only_files_of_the_console_are_served(served: Served) -> None:
    """No path leads out of the folder, and the routes are no part of the API."""
    for path in ("/console/../pages.py", "/console/%2e%2e%2fpages.py", "/console/pages.py", "/console/", "/console"):
        assert served.call("GET", path).status == 404
    assert "/console/main.js" not in served.ok("GET", "/openapi.json")["paths"]
    assert {route.path for route in console_routes()} >= {"/", "/console/style.css", "/console/main.js"}


def test_files_name_no_other_address_and_write_no_markup() -> None:
    """The console works without any other host, and text never becomes markup."""
    for path in STATIC.iterdir():
        text = path.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(https?:)?//[a-z0-9-]+\.[a-z]", text), path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path.name
        )
        assert path.suffix == ".svg" or "<style" not in text


def test_imports_of_scripts_exist() -> None:
    """Every module imports names that another one exports: a typo would leave the page empty."""
    exported = {
        path.name: set(re.findall(r"^export (?:async )?(?:function\*?|const|class) (\w+)", path.read_text(), re.M))
        for path in SCRIPTS
    }
    for path in SCRIPTS:
        for names, module in re.findall(r'^import \{ ([^}]*) \} from "\./([^"]+)";', path.read_text(), re.M):
            assert set(names.split(", ")) <= exported[module], f"{path.name} from {module}"


def test_scripts_stay_small() -> None:
    """No file of the console has more than 500 lines."""
    assert SCRIPTS
    assert {path.name: n for path in STATIC.iterdir() if (n := len(path.read_text().splitlines())) > 500} == {}
