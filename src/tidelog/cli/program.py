"""What to type to run this very program again, so that a command in a hint works when it is pasted."""

from __future__ import annotations

import functools
import shlex
import shutil
import sys
from pathlib import Path

_NAME = "tidelog"


@functools.cache
def program() -> str:
    """`tidelog` where the shell finds this one under that name, else its path, else the module."""
    script = _script()
    if script is None:
        return f"{shlex.quote(sys.executable)} -m tidelog.cli.main"
    on_path = shutil.which(_NAME)
    if on_path is not None and Path(on_path).resolve() == script.resolve():
        return _NAME
    return shlex.quote(str(_from_here(script)))


def _script() -> Path | None:
    """The installed script: the one that was started, or the one beside the interpreter."""
    started = Path(sys.argv[0])
    candidates = [started] if started.name == _NAME else []
    candidates.append(Path(sys.executable).with_name(_NAME))
    return next((path.absolute() for path in candidates if path.is_file()), None)


def _from_here(path: Path) -> Path:
    """Relative to the current directory where it lies below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
