"""The process from which Spark's Python workers of a local session are forked.

Spark puts zipped copies of its Python files in front of everything else, and Python compiles what it imports from a zip
every time: most of a second for each of the first five processes of a session. Where the same files are installed as a
package, which is where the zips come from, this takes the package instead, and is Spark's own daemon from there on.

Invariants: nothing but the standard library and Spark is imported here. Workers are forked from this process, and the
client of object stores hangs in the child of a process that has used it.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder


def without_zipped_copies(path: list[str]) -> list[str]:
    """The path without the zips and jars that lie in the folder of the Spark that is installed on the rest of it."""
    zipped = [entry for entry in path if entry.endswith((".zip", ".jar"))]
    rest = [entry for entry in path if entry not in zipped]
    spark, bridge = PathFinder.find_spec("pyspark", rest), PathFinder.find_spec("py4j", rest)
    if spark is None or spark.origin is None or bridge is None:
        return path
    home = os.path.realpath(os.path.dirname(spark.origin))
    copies = {entry for entry in zipped if os.path.realpath(entry).startswith(home + os.sep)}
    return [entry for entry in path if entry not in copies]


def main() -> None:
    """Runs Spark's daemon; it reads from Spark which worker module its children shall run."""
    sys.path[:] = without_zipped_copies(sys.path)
    from pyspark.daemon import manager

    manager()


if __name__ == "__main__":
    main()
