"""Two brokers for every client: `tidelog serve`, and a real Kafka to compare with. `make test-clients` runs this.

What the clients need (jars, modules of Go and of Node) is fetched with mvn, go and npm into build/clients, once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.clients.conftest import Service
from tests.service.auth.certificates import Authority
from tests.service.kafka.secured import change_accounts, grant

import tidelog
from tidelog.cli.dev_s3 import free_ports
from tidelog.service.auth.accounts import adding_user, granting, make_user

ROOT = Path(__file__).parents[3]
WORKSHOP = ROOT / "build" / "clients"
PROGRAMS = Path(__file__).with_name("programs")
RUN_KAFKA = ROOT / "scripts" / "run-kafka"
PATIENCE_SECONDS = 600


def run(
    *command: str | Path,
    given: str | None = None,
    directory: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> str:
    """What a program wrote to stdout; it must succeed."""
    done = subprocess.run(
        [str(word) for word in command],
        input=given,
        cwd=directory,
        env={**os.environ, **(variables or {})},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def need(program: str, remedy: str) -> str:
    """The path of a program; it is an error if it is not installed."""
    found = shutil.which(program)
    assert found is not None, f"{program} is not installed: {remedy}"
    return found


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real Kafka."""
    need("mvn", "apt-get install maven")
    base = tmp_path_factory.mktemp("kafka")
    jars = WORKSHOP / "kafka" / "jars"
    jars.mkdir(parents=True, exist_ok=True)
    (base / "jars").symlink_to(jars)
    variables = {"KAFKA_BASE": str(base), "KAFKA_PORT": str(free_ports(1)[0])}
    started = subprocess.run(
        [str(RUN_KAFKA), "start"],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    try:
        yield started.stdout.split()[1]
    finally:
        subprocess.run([str(RUN_KAFKA), "stop"], env={**os.environ, **variables}, timeout=PATIENCE_SECONDS, check=True)


@pytest.fixture
def tool(tmp_path: Path) -> Callable[..., str]:
    """Runs one of Kafka's own Java tools."""
    jars = WORKSHOP / "kafka" / "jars"
    jars.mkdir(parents=True, exist_ok=True)

    def run_tool(main_class: str, *arguments: str, given: str | None = None) -> str:
        base = tmp_path / "tool"
        base.mkdir(exist_ok=True)
        if not (base / "jars").exists():
            (base / "jars").symlink_to(jars)
        return run(
            RUN_KAFKA,
            "tool",
            f"org.apache.kafka.tools.{main_class}",
            *arguments,
            given=given,
            variables={"KAFKA_BASE": str(base)},
        )

    return run_tool


class Secured(NamedTuple):
    """A server with TLS and SCRAM, and what a client has to know."""

    address: str
    authority: str
    user: str = "root"
    password: str = "PLANTED-PASSWORD-of-root"

    @property
    def variables(self) -> dict[str, str]:
        """For the programs here."""
        return {"KAFKA_CA": self.authority, "KAFKA_USER": self.user, "KAFKA_PASSWORD": self.password}

    def properties(self, password: str | None = None) -> str:
        """For clients in Java."""
        login = "org.apache.kafka.common.security.scram.ScramLoginModule"
        return (
            "security.protocol=SASL_SSL\nsasl.mechanism=SCRAM-SHA-256\nssl.truststore.type=PEM\n"
            f"ssl.truststore.location={self.authority}\n"
            f'sasl.jaas.config={login} required username="{self.user}" password="{password or self.password}";\n'
        )


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Secured]:
    """`tidelog serve` with TLS and authentication."""
    directory, authority = tmp_path / "secured", Authority(tmp_path / "certificates")
    own = authority.signed("server", "server", "localhost")
    found = Secured("", authority.path)
    with tidelog.open(str(directory)) as log:
        user = make_user(found.password, 0)
        change_accounts(log, adding_user(found.user, user), granting(grant(f"{found.user} admin *")))
    service = Service(directory, "--auth", "required", "--tls-cert", own.cert, "--tls-key", own.key)
    try:
        yield found._replace(address=service.start().kafka)
    finally:
        service.close()


@pytest.fixture
def brokers(service: Service, kafka: str) -> dict[str, str]:
    """The addresses of both."""
    return {"kafka": kafka, "tidelog": service.kafka}
