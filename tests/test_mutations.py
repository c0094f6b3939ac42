"""The list of deliberate breaks is up to date: `make mutations` can make each of them, and knows who must notice it."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
FEWEST = 60
AREAS = ("files.py", "log/", "store/", "cold/", "topics/", "engine/", "pipeline/")


class Mutation(NamedTuple):
    """As it is in the file."""

    file: str
    old: str
    new: str
    test: str


MUTATIONS = [Mutation(**one) for one in tomllib.loads((ROOT / "tests/mutations.toml").read_text("utf-8"))["mutation"]]
each_mutation = pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: f"{one.file}-{one.test}")


def function_of(test: str) -> ast.FunctionDef | None:
    """The function that a test is, without its parameters."""
    path, *names = test.partition("[")[0].split("::")
    found: ast.Module | ast.ClassDef | ast.FunctionDef = ast.parse((ROOT / path).read_text("utf-8"))
    for name in names:
        inside = [one for one in found.body if isinstance(one, ast.ClassDef | ast.FunctionDef) and one.name == name]
        if not inside:
            return None
        found = inside[0]
    return found if isinstance(found, ast.FunctionDef) else None


@each_mutation
def test_a_mutation_can_be_made(mutation: Mutation) -> None:
    """Its text is in the file once, and what comes in its place is Python."""
    source = (ROOT / mutation.file).read_text("utf-8")
    assert source.count(mutation.old) == 1
    changed = source.replace(mutation.old, mutation.new)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))


@each_mutation
def test_a_mutation_is_noticed_by_a_test_of_every_day(mutation: Mutation) -> None:
    """The test that is named exists, and `make test` runs it."""
    function = function_of(mutation.test)
    assert function is not None
    assert not any("mark.long" in ast.unparse(one) for one in function.decorator_list)


def test_every_part_is_broken() -> None:
    """There are many of them, and of each part of the product some."""
    assert len(MUTATIONS) >= FEWEST
    counts = Counter(area for one in MUTATIONS for area in AREAS if one.file.startswith(f"src/tidelog/{area}"))
    assert set(counts) == set(AREAS)
