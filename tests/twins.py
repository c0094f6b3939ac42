"""The extension in C and an oracle in Python, held against each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def outcome(function: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """What a call gave, in a form that two implementations can be compared by."""
    try:
        return "returned", function(*arguments)
    except Exception as error:  # noqa: BLE001 - whatever it is, the oracle must raise the same
        return "raised", type(error), str(error)


def agreed(kernel: object, twin: object, name: str, *arguments: Any) -> tuple[Any, ...]:
    """The one outcome that a function of this name has in both of them."""
    native = outcome(getattr(kernel, name), *arguments)
    assert native == outcome(getattr(twin, name), *arguments)
    return native
