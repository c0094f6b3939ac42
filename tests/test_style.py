"""Style is itself tested: what a reader may rely on in every file, beyond what the linters check."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What the build generates is nobody's style.
SOURCES = sorted(path for path in (ROOT / "src").rglob("*.py") if "wire/api_" not in path.as_posix())
NATIVE = sorted((ROOT / "src/tidelog/native").glob("*.[ch]"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MAX_LINES = 900
# Names that say nothing about what is inside, so that everything ends up there.
VAGUE_NAMES = {"common", "helper", "helpers", "misc", "util", "utils"}
MODULE = re.compile(r"`([a-z_][a-z0-9_/]*\.py)`")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def name_of(path: Path) -> str:
    """How a file is called in a report."""
    return str(path.relative_to(ROOT))


def nodes_of(path: Path, *words: str) -> Iterator[ast.AST]:
    """Everything in the syntax tree of a file; nothing, if there are words and the file has none of them."""
    text = path.read_text("utf-8")
    if not words or any(word in text for word in words):
        yield from ast.walk(ast.parse(text, filename=str(path)))


def definitions_of(tree: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions of a module and of its classes, where tests are: much faster than every node."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from definitions_of(node)


def is_call_of(node: ast.AST, function: str) -> bool:
    """Whether a node calls a function by this bare name."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function


def test_files_stay_small() -> None:
    """No source file has more than 900 lines."""
    lines = {name_of(path): len(path.read_text("utf-8").splitlines()) for path in SOURCES + NATIVE}
    assert lines
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_names_say_what_is_inside() -> None:
    """No module or package is called utils, helpers or the like."""
    vague = [name_of(path) for path in SOURCES if VAGUE_NAMES & set(path.relative_to(ROOT).with_suffix("").parts)]
    assert vague == []


def test_modules_explain_themselves() -> None:
    """Every module opens with a docstring; only an `__init__.py` may be empty instead."""
    silent = []
    for path in SOURCES + TESTS:
        text = path.read_text("utf-8")
        if text.startswith('"""'):
            continue
        tree = ast.parse(text)
        if ast.get_docstring(tree) is None and (tree.body or path.name != "__init__.py"):
            silent.append(name_of(path))
    assert silent == []


def test_tests_say_what_they_test() -> None:
    """Every test function has a docstring."""
    silent = [
        f"{name_of(path)}::{node.name}"
        for path in TESTS
        for node in definitions_of(ast.parse(path.read_text("utf-8")))
        if node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert silent == []


def test_modules_import_from_where_things_are() -> None:
    """No module of a part imports from `tidelog` itself, which has everything: only its modules are there."""
    inside = {path.stem for path in (ROOT / "src/tidelog").iterdir()} | {"_native"}
    wrong = [
        f"{name_of(path)}:{node.lineno}"
        for path in SOURCES
        if path.parent != ROOT / "src/tidelog"
        for node in nodes_of(path, "from tidelog import")
        if isinstance(node, ast.ImportFrom) and node.module == "tidelog" and {one.name for one in node.names} - inside
    ]
    assert wrong == []


def test_tests_are_not_skipped() -> None:
    """No test is skipped or expected to fail: it passes, or it is not there."""
    excuses = {"skip", "skipif", "xfail", "importorskip"}
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in TESTS
        for node in nodes_of(path, *excuses)
        if isinstance(node, ast.Attribute) and node.attr in excuses
    ]
    assert found == []


def test_campaigns_have_more_examples() -> None:
    """A test that says how many examples it wants lets a campaign have more: `max_examples=examples(...)`."""
    fixed = [
        f"{name_of(path)}:{node.value.lineno}"
        for path in TESTS
        for node in nodes_of(path, "max_examples")
        if isinstance(node, ast.keyword) and node.arg == "max_examples" and path.name != "campaign.py"
        if not is_call_of(node.value, "examples")
    ]
    assert fixed == []


def test_nobody_uses_the_generator_of_the_random_module() -> None:
    """A program that seeds `random` gets the numbers it expects, and so does a test beside our threads: `jittered`."""
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in SOURCES
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random"
        if node.attr not in ("Random", "SystemRandom")
    ]
    assert found == []


def test_only_the_command_line_prints() -> None:
    """Nothing outside `tidelog.cli` prints: a library reports by return values, errors and statistics."""
    printing = [
        name_of(path)
        for path in SOURCES
        if "cli" not in path.parts and any(is_call_of(node, "print") for node in nodes_of(path, "print"))
    ]
    assert printing == []


def test_exported_names_exist() -> None:
    """Every name that a module promises in `__all__` is there, once. (Their order is the linter's business.)"""
    broken = []
    for path in SOURCES:
        if "__all__" not in path.read_text("utf-8"):
            continue
        parts = path.relative_to(ROOT / "src").with_suffix("").parts
        module = importlib.import_module(".".join(part for part in parts if part != "__init__"))
        names = list(module.__all__)
        broken += [f"{module.__name__}.{name}" for name in names if names.count(name) > 1 or not hasattr(module, name)]
    assert broken == []


def test_modules_that_comments_name_exist() -> None:
    """A reader who is sent to another module, as in `frame.py` or `log/frame.py`, finds it."""
    paths = [f"/{name_of(path)}" for path in [*SOURCES, *TESTS, *(ROOT / "examples").glob("*.py")]]
    named = [(path, name) for path in SOURCES for name in MODULE.findall(path.read_text("utf-8"))]
    lost = [f"{name_of(path)}: {name}" for path, name in named if not any(one.endswith(f"/{name}") for one in paths)]
    assert lost == []


def test_links_lead_somewhere() -> None:
    """Every link from a document to a file of the project finds it."""
    links = [(path, target) for path in DOCUMENTS for target in LINK.findall(path.read_text("utf-8"))]
    local = [(path, target) for path, target in links if "://" not in target]
    assert [f"{name_of(path)}: {target}" for path, target in local if not (path.parent / target).exists()] == []
