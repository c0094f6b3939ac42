"""Builds the C extensions; everything else about the package is in pyproject.toml.

None is needed: where one cannot be built, a warning says so, the install goes on, and its pure-Python twin is used.
"""

from __future__ import annotations

import glob
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

_WARNING = """
************************************************************************
WARNING: {name} could not be built:
    {reason}
tidelog works without it: its pure-Python fallback is used, which is many
times slower. To get the fast one, install a C compiler and the headers of
Python, then install tidelog again:
    Debian, Ubuntu   apt-get install gcc python3-dev
    Fedora, RHEL     dnf install gcc python3-devel
    Alpine           apk add gcc musl-dev python3-dev
    macOS            xcode-select --install
************************************************************************
"""


class BuildOptionalExtensions(build_ext):
    """Says what to do when an extension does not compile; setuptools then goes on, as it is marked optional."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:
            print(_WARNING.format(name=ext.name, reason=error), file=sys.stderr)
            raise


def _extension(name: str) -> Extension:
    source = f"src/{name.replace('.', '/')}.c"
    headers = sorted(glob.glob("src/tidelog/*/_*.h"))  # named, so that a change builds again and an sdist holds them
    return Extension(name, [source], depends=headers, extra_compile_args=["-O3", "-Wall", "-Wextra"], optional=True)


setup(
    ext_modules=[
        _extension("tidelog.log._kernel"),
        _extension("tidelog.topics._envelope"),
        _extension("tidelog.engine._engine"),
        _extension("tidelog.engine._entries"),
        _extension("tidelog.engine._record"),
    ],
    cmdclass={"build_ext": BuildOptionalExtensions},
)
