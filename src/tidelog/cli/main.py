"""The entry point of the `tidelog` command: `main()` returns the exit code (see `tidelog.cli.errors`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line, that of the process by default."""
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


if __name__ == "__main__":
    sys.exit(main())
