"""The guide is held to the server: every curl command of it runs, and succeeds."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.service.http.serving import WAIT_SECONDS, Served

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "http.md"


def test_commands_of_the_guide_run(served: Served) -> None:
    """A reader who copies the commands in their order gets what the guide promises."""
    blocks = re.findall(r"^```sh curl\n(.*?)^```$", GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines() if line]
    assert len(commands) >= 8
    url = f"http://{served.address.host}:{served.address.port}"
    for command in commands:
        done = subprocess.run(
            ["sh", "-c", command.replace("curl ", "curl -sS --fail-with-body ", 1)],
            env={**os.environ, "TIDELOG": url},
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
