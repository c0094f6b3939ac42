"""The entry point of the `tidelog` command: `main()` returns the exit code (see `tidelog.cli.errors`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line, that of the process by default."""
    _open_missing_streams()
    try:
        from tidelog.cli.app import run
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(f"error: the command line needs the package {error.name}", file=sys.stderr)
        print("hint: pip install 'tidelog[cli]'", file=sys.stderr)
        return 2
    return run(sys.argv[1:] if arguments is None else arguments)


def _open_missing_streams() -> None:
    """A stream that was closed by whoever started us leads nowhere; else the next file to be opened would become it."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != descriptor:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


if __name__ == "__main__":
    sys.exit(main())
