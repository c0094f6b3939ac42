"""The entry point of the `tidelog` command: `main()` returns the exit code (see `tidelog.cli.errors`)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line, that of the process by default."""
    _open_missing_streams()
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        from tidelog.cli.app import run
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        _report_missing(error.name, as_json=asks_for_json(arguments))
        return 2
    return run(arguments)


def asks_for_json(arguments: Sequence[str]) -> bool:
    """Whether --json is among the options of a command line, also of one that cannot be understood."""
    arguments = list(arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return "--json" in arguments[:end]


def _report_missing(package: str, *, as_json: bool) -> None:
    message, hint = f"the command line needs the package {package}", "pip install 'tidelog[cli]'"
    if as_json:
        told = {"type": "ModuleNotFoundError", "message": message, "hint": hint, "exit_code": 2}
        print(json.dumps({"error": told}), file=sys.stderr)
    else:
        print(f"error: {message}\nhint: {hint}", file=sys.stderr)


def _open_missing_streams() -> None:
    """Redirects a stream that our parent closed to nowhere; else the next file to be opened would become it."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != descriptor:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


if __name__ == "__main__":
    sys.exit(main())
