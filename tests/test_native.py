"""The extension as a whole: one module that is required, whose stub and oracles have all of its functions."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

from tidelog import _native

ROOT = Path(__file__).resolve().parent.parent
FUNCTIONS = {name for name, found in vars(_native).items() if inspect.isbuiltin(found)}


def test_the_stub_has_what_the_extension_has() -> None:
    """Every function is in `_native.pyi`, and nothing else is."""
    tree = ast.parse((ROOT / "src/tidelog/_native.pyi").read_text("utf-8"))
    assert {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} == FUNCTIONS


def test_every_function_has_an_oracle() -> None:
    """Functions that nothing in Python defines could answer anything. That of the portable checksum is zlib."""
    modules = [importlib.import_module(f"tests.oracles.{path.stem}") for path in (ROOT / "tests/oracles").glob("*.py")]
    assert {name for name in FUNCTIONS if not any(hasattr(one, name) for one in modules)} == {"crc32_portable"}


def test_an_installation_without_a_compiler_fails_and_says_what_to_install(tmp_path: Path) -> None:
    """A package without its extension would install, and then fail at the first import."""
    command = [sys.executable, "setup.py", "-q", "build_ext", f"--build-temp={tmp_path}", f"--build-lib={tmp_path}"]
    environment = {**os.environ, "CC": str(tmp_path / "no-compiler")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "tidelog._native, the part of tidelog that is C, could not be built" in done.stderr
    assert "apt-get install gcc python3-dev" in done.stderr
    assert list(tmp_path.rglob("*.so")) == []
