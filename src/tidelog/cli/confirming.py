"""Asking before something is deleted for good."""

from __future__ import annotations

import sys

import typer

from tidelog.errors import InputError


def is_confirmed(question: str, what: str) -> bool:
    """The answer of whoever sits there; InputError where nobody does."""
    if not sys.stdin.isatty():
        raise InputError(f"{what} needs a yes", hint="Give it with --yes")
    return typer.confirm(question, err=True)
