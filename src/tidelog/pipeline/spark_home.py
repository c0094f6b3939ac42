"""A home of Spark without the zipped copies of its Python files.

Spark puts `python/lib/pyspark.zip` of its home in front of the path of every Python process it starts, and Python
compiles what it imports from a zip every time: most of a second for each of the first five processes of a session.
Where the home is the installed package, those processes find the same files there, compiled.

Invariants: such a home is a folder of links to the installed package, so it takes no room and follows it; it is made
under another name and renamed, so that two may make it at once; where it cannot be, Spark's own home serves.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

_ZIPPED = "python"


def installed_home() -> Path:
    """The home that Spark's launcher takes by itself."""
    from pyspark.find_spark_home import _find_spark_home

    return Path(_find_spark_home())


def lean_home(directory: Path) -> Path | None:
    """The home without zips, made in a directory; None where it cannot be, or Spark is no package of this Python."""
    import pyspark

    package = Path(pyspark.__file__).resolve().parent
    if installed_home().resolve() != package:
        return None
    identity = hashlib.sha256(f"{package}\n{version('pyspark')}".encode()).hexdigest()[:16]
    lean = directory / f"home-{identity}"
    try:
        if not lean.is_dir():
            _make(lean, package)
    except OSError:
        return None
    return lean


def _make(lean: Path, package: Path) -> None:
    lean.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=lean.parent, prefix=".home-"))
    try:
        for entry in package.iterdir():
            if entry.name != _ZIPPED:
                os.symlink(entry, unfinished / entry.name)
        with contextlib.suppress(FileExistsError):
            _rename(unfinished, lean)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _rename(unfinished: Path, lean: Path) -> None:
    """A folder with something in it is not replaced: somebody else was first, and made the same."""
    try:
        os.rename(unfinished, lean)
    except OSError:
        if not lean.is_dir():
            raise
