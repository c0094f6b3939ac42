"""Which Java Spark will run on, found and asked before Spark is started.

Invariants: the same Java is found as Spark's own launcher finds (`JAVA_HOME`, else `java` on the path); nothing here
imports Spark, so the machine can be checked without it; what is missing is said together with how to get it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from tidelog.errors import ConfigError

OLDEST_JAVA = 17
JAVA_HINT = (
    f"Spark needs Java {OLDEST_JAVA} or newer. Install one (Debian, Ubuntu: apt-get install openjdk-17-jre-headless; "
    "macOS: brew install openjdk@17), or point JAVA_HOME to one that is installed"
)
_ANSWER_SECONDS = 30


class Java(NamedTuple):
    """A Java that runs; `told` is all that it says about itself, which differs between any two builds."""

    program: str
    version: int
    told: str


def find_java() -> Java:
    """The Java that Spark's launcher will take; an error says what is wrong with it and how to get one."""
    home = os.environ.get("JAVA_HOME")
    program = shutil.which("java", path=str(Path(home, "bin"))) if home else shutil.which("java")
    if program is None:
        where = f"JAVA_HOME is {home}, and there is no bin/java in it" if home else "there is no java on the path"
        raise ConfigError(where, operation="find Java", hint=JAVA_HINT)
    told = _told_by(program)
    version = java_version(told)
    if version is None or version < OLDEST_JAVA:
        text = f"{program} is version {version or 'unknown'}, older than {OLDEST_JAVA}"
        raise ConfigError(text, operation="find Java", hint=JAVA_HINT)
    return Java(program, version, told)


def _told_by(program: str) -> str:
    command = [program, "-version"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False).stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{program} does not run: {error}", operation="find Java", hint=JAVA_HINT) from error


def java_version(text: str) -> int | None:
    """The feature version that `java -version` tells; before 9 it was written 1.8."""
    match = re.search(r'version "(?:1\.)?(\d+)', text)
    return None if match is None else int(match[1])
