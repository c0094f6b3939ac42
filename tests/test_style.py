"""Style is itself tested: what a reader may rely on in every file, beyond what the linters check."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
KERNELS = sorted((ROOT / "src").rglob("*.[ch]"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MAX_LINES = 600
# Names that say nothing about what is inside, so that everything ends up there.
VAGUE_NAMES = {"common", "helper", "helpers", "misc", "util", "utils"}
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def name_of(path: Path) -> str:
    """How a file is called in a report."""
    return str(path.relative_to(ROOT))


def nodes_of(path: Path) -> list[ast.AST]:
    """Everything in the syntax tree of a file."""
    return list(ast.walk(ast.parse(path.read_text("utf-8"), filename=str(path))))


def is_call_of(node: ast.AST, function: str) -> bool:
    """Whether a node calls a function by this bare name."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function


def test_files_stay_small() -> None:
    """No source file has more than 600 lines."""
    lines = {name_of(path): len(path.read_text("utf-8").splitlines()) for path in SOURCES + KERNELS}
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
        tree = ast.parse(path.read_text("utf-8"))
        if ast.get_docstring(tree) is None and (tree.body or path.name != "__init__.py"):
            silent.append(name_of(path))
    assert silent == []


def test_tests_say_what_they_test() -> None:
    """Every test function has a docstring."""
    silent = [
        f"{name_of(path)}::{node.name}"
        for path in TESTS
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not ast.get_docstring(node)
    ]
    assert silent == []


def test_tests_are_not_skipped() -> None:
    """No test is skipped or expected to fail: it passes, or it is not there."""
    excuses = {"skip", "skipif", "xfail", "importorskip"}
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in TESTS
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and node.attr in excuses
    ]
    assert found == []


def test_campaigns_have_more_examples() -> None:
    """A test that says how many examples it wants lets a campaign have more: `max_examples=examples(...)`."""
    fixed = [
        f"{name_of(path)}:{node.value.lineno}"
        for path in TESTS
        for node in nodes_of(path)
        if isinstance(node, ast.keyword) and node.arg == "max_examples" and path.name != "campaign.py"
        if not is_call_of(node.value, "examples")
    ]
    assert fixed == []


def test_only_the_command_line_prints() -> None:
    """Nothing outside `tidelog.cli` prints: a library reports by return values, errors and statistics."""
    printing = [
        name_of(path)
        for path in SOURCES
        if "cli" not in path.parts and any(is_call_of(node, "print") for node in nodes_of(path))
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


def test_links_lead_somewhere() -> None:
    """Every link from a document to a file of the project finds it."""
    links = [(path, target) for path in DOCUMENTS for target in LINK.findall(path.read_text("utf-8"))]
    local = [(path, target) for path, target in links if "://" not in target]
    assert [f"{name_of(path)}: {target}" for path, target in local if not (path.parent / target).exists()] == []
