"""tidelog as one file that Spark takes to the executors of a cluster.

The file is a zip of this package, its compiled extension and what executors need besides Spark and Arrow. Spark unpacks
it in the working directory of every executor, since compiled modules cannot be imported from a zip, and the path of the
Python workers leads there.

Invariants:

- What executors import is, byte for byte, what the driver runs.
- The bytes of a package depend on its contents only; it appears under its name when it is whole.
- Native code comes along, so executors need the system, processor and minor version of Python of the driver. Where they
  differ, tidelog is installed there and nothing is sent (`docs/how-to/spark-cluster.md`).
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from tidelog.errors import InternalError

ARCHIVES = "spark.archives"
EXECUTOR_PATH = "spark.executorEnv.PYTHONPATH"
UNPACKED = "tidelog_packages"
# What the executors' part of tidelog imports, itself included. Spark and Arrow are the cluster's.
_MODULES = (
    *("tidelog", "pyspark_tidelog", "pyspark_tidelog_entries", "pyspark_tidelog_objects"),
    *("msgspec", "obstore", "zstandard", "typing_extensions"),
)
_NEEDED_BY_OLDER_PYTHONS = "typing_extensions"
_LEFT_OUT = {"__pycache__"}
_LEFT_OUT_SUFFIXES = (".pyc", ".c", ".h", ".pyi")
_EPOCH = (1980, 1, 1, 0, 0, 0)
_READ_BYTES = 1 << 20


def pack_for_cluster(path: str | Path) -> Path:
    """Writes the package to a file; for `spark-submit --archives FILE#tidelog_packages`."""
    return _write(Path(path), _contents())


def cluster_settings(package: str | Path) -> dict[str, str]:
    """The settings of Spark that bring a package to the executors."""
    return {ARCHIVES: f"{Path(package).absolute().as_uri()}#{UNPACKED}", EXECUTOR_PATH: UNPACKED}


def sending_settings(settings: dict[str, str], directory: Path) -> dict[str, str]:
    """The same for a package of what runs here, made in a directory once; none where the caller has set either."""
    if ARCHIVES in settings or EXECUTOR_PATH in settings:
        return {}
    contents = _contents()
    package = directory / f"tidelog-{_identity(contents)}.zip"
    if not package.exists():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(package, contents)
    os.utime(package)
    return cluster_settings(package)


def _contents() -> dict[str, Path]:
    """The files of the package, by their names in it."""
    return {name: file for module in _MODULES for name, file in sorted(_files_of(module))}


def _files_of(module: str) -> Iterator[tuple[str, Path]]:
    spec = find_spec(module)
    if spec is None and module == _NEEDED_BY_OLDER_PYTHONS:
        return
    if spec is None or spec.origin is None:
        raise InternalError(f"{module} is not installed and cannot be packed", operation="pack tidelog for a cluster")
    origin = Path(spec.origin)
    if spec.submodule_search_locations is None:
        yield origin.name, origin
        return
    for directory, folders, names in os.walk(origin.parent):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        for name in names:
            if not name.endswith(_LEFT_OUT_SUFFIXES):
                file = Path(directory, name)
                yield str(file.relative_to(origin.parent.parent)), file


def _identity(contents: dict[str, Path]) -> str:
    digest = hashlib.sha256()
    for name, file in contents.items():
        digest.update(f"{name}\0".encode())
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:24]


def _write(path: Path, contents: dict[str, Path]) -> Path:
    compressed = zipfile.ZIP_DEFLATED
    handle, unfinished = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    try:
        with (
            os.fdopen(handle, "wb") as file,
            zipfile.ZipFile(file, "w", compressed, compresslevel=1) as package,
        ):
            for name, source in contents.items():
                _add(package, name, source)
        os.chmod(unfinished, 0o644)
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise
    return path


def _add(package: zipfile.ZipFile, name: str, source: Path) -> None:
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o100644 << 16
    with source.open("rb") as reader, package.open(entry, "w") as writer:
        while chunk := reader.read(_READ_BYTES):
            writer.write(chunk)
