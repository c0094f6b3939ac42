"""Builds the C extension and Kafka's codec; everything else about the package is in pyproject.toml.

It is required: where no wheel fits, installing needs a C compiler, and without one it fails and says what to install.
"""

from __future__ import annotations

import glob
import runpy
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

_HELP = """
************************************************************************
ERROR: {name}, the part of tidelog that is C, could not be built:
    {reason}
Install a C compiler and the headers of Python, then install tidelog again:
    Debian, Ubuntu   apt-get install gcc python3-dev
    Fedora, RHEL     dnf install gcc python3-devel
    Alpine           apk add gcc musl-dev python3-dev
    macOS            xcode-select --install
************************************************************************
"""


def generate_codec() -> None:
    """Writes the modules of Kafka's messages; their generator needs only Python."""
    runpy.run_path("scripts/kafka_codec/generate.py")["main"]()


class BuildPython(build_py):
    """Generates modules before it collects them; in an editable installation they are used where they are."""

    def run(self) -> None:
        generate_codec()
        super().run()


class BuildExtension(build_ext):
    """Says what to install when the extension does not compile."""

    def run(self) -> None:
        generate_codec()
        super().run()

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:
            print(_HELP.format(name=ext.name, reason=error), file=sys.stderr)
            raise


_NATIVE = Extension(
    "tidelog._native",
    sorted(glob.glob("src/tidelog/native/*.c")),
    depends=sorted(glob.glob("src/tidelog/native/*.h")),  # named, so that a change builds again and an sdist holds them
    extra_compile_args=["-O3", "-Wall", "-Wextra", "-fvisibility=hidden"],
)

setup(ext_modules=[_NATIVE], cmdclass={"build_ext": BuildExtension, "build_py": BuildPython})
