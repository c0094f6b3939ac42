"""The tests of imports run the command line as its own tests do."""

from __future__ import annotations

from tests.cli.conftest import cli, spawn

__all__ = ["cli", "spawn"]
