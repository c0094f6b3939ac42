"""Clients in other languages, unmodified: each does the same with `tidelog serve` and with a real Kafka, and sees the
same, field by field."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from tests.clients.foreign.conftest import PROGRAMS, WORKSHOP, Secured, need, run

pytestmark = pytest.mark.foreign
_numbers = itertools.count()

GO_MODULES = {
    "franz": ("github.com/twmb/franz-go@v1.22.2", "github.com/twmb/franz-go/pkg/kadm@v1.19.0"),
    "sarama": ("github.com/IBM/sarama@v1.61.1", "github.com/xdg-go/scram@v1.1.2"),
}
SPARK_JARS = (
    *(
        "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
        "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    ),
    *("org.apache.kafka:kafka-clients:3.9.2", "org.apache.commons:commons-pool2:2.13.1"),
)


def new_topic() -> str:
    """A name without a namespace: both brokers know such."""
    return f"foreign-{os.getpid()}-{next(_numbers)}"


def assert_same(brokers: dict[str, str], work: Callable[[str, str], Any]) -> Any:
    """The same work with both brokers, with the same topic, has the same result, which is returned."""
    topic = new_topic()
    results = {name: work(address, topic) for name, address in brokers.items()}
    assert results["tidelog"] == results["kafka"]
    return results["tidelog"]


@pytest.fixture(scope="module")
def go_program() -> Callable[[str], Path]:
    """Builds a program of Go."""

    def build(name: str) -> Path:
        go = need("go", "install Go 1.24 or newer")
        directory = WORKSHOP / name
        directory.mkdir(parents=True, exist_ok=True)
        source, fetched = (PROGRAMS / f"{name}.go").read_text(), directory / "fetched"
        (directory / "main.go").write_text(source)
        if not fetched.exists() or fetched.read_text() != source:
            (directory / "go.mod").unlink(missing_ok=True)
            run(go, "mod", "init", f"tidelog/{name}", directory=directory)
            run(go, "get", *GO_MODULES[name], directory=directory)
            run(go, "mod", "tidy", directory=directory)
            fetched.write_text(source)
        run(go, "build", "-o", "program", ".", directory=directory)
        return directory / "program"

    return build


@pytest.mark.parametrize("name", ["franz", "sarama"])
def test_clients_in_go(brokers: dict[str, str], go_program: Callable[[str], Path], name: str) -> None:
    """Admin, five codecs, idempotence, transactions, groups, both isolation levels, offsets by time, lag."""
    program = go_program(name)
    seen = assert_same(brokers, lambda broker, topic: json.loads(run(program, broker, topic)))
    assert (len(seen["all"]), len(seen["seen"])) == (302, 301)


def kafkajs(broker: str, topic: str, **variables: str) -> Any:
    """What the program in JavaScript says."""
    node, npm = need("node", "install Node 20 or newer"), need("npm", "install Node 20 or newer")
    directory = WORKSHOP / "kafkajs"
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "node_modules" / "kafkajs").exists():
        run(npm, "install", "--no-audit", "--no-fund", "--no-package-lock", "kafkajs@2.2.4", directory=directory)
    (directory / "program.js").write_text((PROGRAMS / "kafkajs.js").read_text())
    return json.loads(run(node, "program.js", broker, topic, directory=directory, variables=variables))


def test_kafkajs(brokers: dict[str, str]) -> None:
    """The same in JavaScript, as far as it has codecs."""
    seen = assert_same(brokers, kafkajs)
    assert (len(seen["all"]), len(seen["seen"])) == (122, 121)


@pytest.mark.parametrize("name", ["franz", "sarama"])
def test_clients_in_go_over_sasl_ssl(secured: Secured, go_program: Callable[[str], Path], name: str) -> None:
    """SCRAM over TLS, everything that they do without it."""
    seen = json.loads(run(go_program(name), secured.address, new_topic(), variables=secured.variables))
    assert (len(seen["all"]), len(seen["seen"])) == (302, 301)


def test_kafkajs_over_sasl_ssl(secured: Secured) -> None:
    """The same in JavaScript."""
    seen = kafkajs(secured.address, new_topic(), **secured.variables)
    assert (len(seen["all"]), len(seen["seen"])) == (122, 121)


def test_java_tools_over_sasl_ssl(secured: Secured, tool: Callable[..., str], tmp_path: Path) -> None:
    """Topics, an idempotent producer, a group, and the refusal of a wrong password."""
    config, topic = tmp_path / "client.properties", new_topic()
    config.write_text(secured.properties())
    server = ("--bootstrap-server", secured.address, "--command-config", str(config))
    tool("TopicCommand", *server, "--create", "--topic", topic, "--partitions", "2")
    lines = "".join(f"value {number}\n" for number in range(50))
    tool("ConsoleProducer", *server, "--topic", topic, given=lines)
    consumed = tool(
        *("consumer.ConsoleConsumer", *server, "--topic", topic, "--from-beginning", "--max-messages", "50"),
        *("--group", f"{topic}-group", "--timeout-ms", "60000"),
    )
    assert sorted(consumed.splitlines()) == sorted(lines.splitlines())
    config.write_text(secured.properties("wrong"))
    with pytest.raises(AssertionError, match="SaslAuthenticationException"):
        tool("TopicCommand", *server, "--list")


def test_kcat(brokers: dict[str, str]) -> None:
    """Produces from stdin, consumes as JSON, and asks for an offset by time."""
    kcat = need("kcat", "apt-get install kcat")

    def work(broker: str, topic: str) -> Any:
        lines = "".join(f"key {number}:value {number}\n" for number in range(100))
        run(kcat, "-b", broker, "-t", topic, "-P", "-K", ":", "-p", "0", "-H", "a=1", given=lines)
        consumed = run(kcat, "-b", broker, "-t", topic, "-C", "-e", "-o", "beginning", "-J", "-q")
        messages = [json.loads(line) for line in consumed.splitlines()]
        for message in messages:
            message.pop("ts")
        at_end = run(kcat, "-b", broker, "-Q", "-t", f"{topic}:0:-1")
        return messages, at_end

    messages, _ = assert_same(brokers, work)
    assert len(messages) == 100


def test_java_tools(brokers: dict[str, str], tool: Callable[..., str]) -> None:
    """kafka-topics, kafka-console-producer and -consumer, kafka-consumer-groups, kafka-get-offsets."""

    def work(broker: str, topic: str) -> Any:
        server, group = ("--bootstrap-server", broker), f"{topic}-group"
        created = tool("TopicCommand", *server, "--create", "--topic", topic, "--partitions", "2")
        lines = "".join(f"k{number}\tvalue {number}\n" for number in range(50))
        tool(
            *("ConsoleProducer", *server, "--topic", topic, "--command-property", "enable.idempotence=true"),
            *("--reader-property", "parse.key=true"),
            given=lines,
        )
        consumed = tool(
            *("consumer.ConsoleConsumer", *server, "--topic", topic, "--from-beginning", "--max-messages", "50"),
            *("--group", group, "--timeout-ms", "60000", "--formatter-property", "print.key=true"),
        )
        described = tool("consumer.group.ConsumerGroupCommand", *server, "--describe", "--group", group)
        reset = tool(
            *("consumer.group.ConsumerGroupCommand", *server, "--group", group, "--topic", topic),
            *("--reset-offsets", "--to-offset", "3", "--execute"),
        )
        offsets = tool("GetOffsetShell", *server, "--topic", topic)
        shown = tool("TopicCommand", *server, "--describe", "--topic", topic)
        tool("consumer.group.ConsumerGroupCommand", *server, "--delete", "--group", group)
        deleted = tool("TopicCommand", *server, "--delete", "--topic", topic)
        return (
            created,
            sorted(consumed.splitlines()),
            sorted(_columns(described, topic, 6)),
            sorted(_columns(reset, topic, 4)),
            sorted(offsets.splitlines()),
            re.findall(r"PartitionCount: \d+|ReplicationFactor: \d+|Partition: \d+", shown),
            deleted,
        )

    seen = assert_same(brokers, work)
    assert len(seen[1]) == 50


def test_java_transactions_tool(brokers: dict[str, str], tool: Callable[..., str]) -> None:
    """kafka-transactions: list, describe, describe-producers and find-hanging, while a transaction is open."""

    def work(broker: str, topic: str) -> Any:
        server = ("TransactionsCommand", "--bootstrap-server", broker)
        producer = Producer({"bootstrap.servers": broker, "transactional.id": topic, "transaction.timeout.ms": 600_000})
        producer.init_transactions(60)
        producer.begin_transaction()
        producer.produce(topic, b"open", partition=0)
        assert producer.flush(60) == 0
        listed = [line.split() for line in tool(*server, "list").splitlines() if topic in line.split()]
        described = tool(*server, "describe", "--transactional-id", topic).splitlines()[-1].split()
        writers = tool(*server, "describe-producers", "--topic", topic, "--partition", "0").splitlines()[-1].split()
        hanging = tool(*server, "find-hanging", "--broker-id", "1", "--max-transaction-timeout", "15")
        producer.abort_transaction(60)
        states = [line.split()[-1] for line in tool(*server, "list").splitlines() if topic in line.split()]
        # Without ids, epochs of coordinators and times.
        shown = [[*words[:1], words[-1]] for words in listed]
        return shown, [described[1], *described[4:6], described[8]], [*writers[2:4], writers[5]], hanging, states

    shown, described, writers, _, states = assert_same(brokers, work)
    assert (len(shown), described[1], writers, states) == (1, "Ongoing", ["-1", "0", "0"], ["CompleteAbort"])


def _columns(text: str, topic: str, count: int) -> list[list[str]]:
    """The first words of the lines about a topic."""
    return [line.split()[:count] for line in text.splitlines() if topic in line.split()]


def test_java_verifiable_producer(brokers: dict[str, str], tool: Callable[..., str]) -> None:
    """An idempotent producer that says what was acknowledged."""

    def work(broker: str, topic: str) -> Any:
        said = tool("VerifiableProducer", "--bootstrap-server", broker, "--topic", topic, "--max-messages", "1000")
        lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        return [(line["partition"], line["offset"]) for line in lines if line["name"] == "producer_send_success"]

    assert assert_same(brokers, work) == [(0, offset) for offset in range(1000)]


@pytest.fixture(scope="module")
def spark_jars() -> str:
    """The jars of Spark's own connector, comma separated."""
    mvn, directory = need("mvn", "apt-get install maven"), WORKSHOP / "spark-jars"
    if not (directory / ".complete").exists():
        for artifact in SPARK_JARS:
            run(
                *(mvn, "-q", "-B", "dependency:copy", f"-Dartifact={artifact}"),
                f"-DoutputDirectory={directory}",
            )
        (directory / ".complete").touch()
    return ",".join(str(jar) for jar in sorted(directory.glob("*.jar")))


def test_sparks_own_connector(brokers: dict[str, str], spark_jars: str, tmp_path: Path) -> None:
    """Writes, reads as a batch, and as a stream that ends; in a process of its own, for the jars are part of a JVM."""
    program = PROGRAMS / "spark_connector.py"

    def work(broker: str, topic: str) -> Any:
        said = run(sys.executable, program, broker, topic, spark_jars, tmp_path / broker.replace(":", "-"))
        return json.loads(said.splitlines()[-1])

    seen = assert_same(brokers, work)
    assert seen["batch"] == [1000, 1000, 999]
