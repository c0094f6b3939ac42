"""What holds for all tests: the same outcome on every machine."""

from __future__ import annotations

import os
import signal

import hypothesis
import pytest
from tests.servers import etcd_server, pytest_runtest_makereport, s3_server

__all__ = ["etcd_server", "pytest_runtest_makereport", "s3_server"]

# A deadline a call measures how busy the machine is; a test that hangs is ended by pytest's own limit.
hypothesis.settings.register_profile("tidelog", deadline=None, print_blob=True)
hypothesis.settings.load_profile("tidelog")

# A shell that starts tests in the background has them ignore Ctrl-C, and whatever they start inherits that: no program
# under test would answer it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test sees the settings that it makes itself; only the choice of the kernel comes from outside."""
    for name in os.environ:
        if name.startswith("TIDELOG_") and name != "TIDELOG_PURE_PYTHON":
            monkeypatch.delenv(name)
