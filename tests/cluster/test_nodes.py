"""Real nodes, etcd and SeaweedFS as processes, under producers and consumers of Kafka's protocol: nodes are drained and
killed, and nothing that was acknowledged is lost, doubled or out of order."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, KafkaException, Producer
from tests.cluster.processes import QUIET, WAIT_SECONDS, DevCluster, Producing, consumed, until

from tidelog.errors import StoreUnavailableError
from tidelog.service.cluster_control import Load
from tidelog.service.placement import slot_of

# Longer than a busy machine pauses a process: a node that is alive must not lose its partitions to others here.
LEASE_SECONDS = 12.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:
    """Three nodes."""
    running = DevCluster(tmp_path_factory.mktemp("cluster"), LEASE_SECONDS)
    try:
        yield running
    finally:
        running.stop()


def check_everything_is_there(cluster: DevCluster, producing: Producing) -> None:
    """Each acknowledged message once, at its offset, in order, and nothing else."""
    producing.stop()
    assert producing.errors == []
    counts = {number: len(some) for number, some in producing.acknowledged.items()}
    assert consumed(cluster, producing.topic, counts) == {
        number: sorted(some) for number, some in producing.acknowledged.items()
    }
    for some in producing.acknowledged.values():
        values = [value for _, value in some]
        assert values == sorted(set(values))


def test_draining_a_node_moves_everything_without_an_error(cluster: DevCluster) -> None:
    """Producers go on, nothing is lost or doubled, and the node comes back when it is undrained."""
    topic = cluster.create()
    until(lambda: set(cluster.leaders(topic).values()) <= set(cluster.nodes))  # any node may be asked: it hears of it
    producing = Producing(cluster, topic)
    producing.more()
    victim = cluster.leaders(topic)[0]
    planned = cluster.command("plan", "--drain", victim)
    assert {one["from"] for one in planned if one["kind"] == "drain"} == {victim}
    assert cluster.command("drain", victim, "--wait", str(WAIT_SECONDS)) == {"node": victim, "done": True}
    producing.more()
    until(lambda: victim not in cluster.leaders(topic).values())
    states = {node["name"]: node["state"] for node in cluster.command("nodes")}
    assert states[victim] == "drained"
    cluster.command("undrain", victim)
    cluster.move(topic, 0, victim)
    producing.more()
    check_everything_is_there(cluster, producing)


def test_nothing_acknowledged_is_lost_with_a_killed_node(cluster: DevCluster) -> None:
    """Its partitions are served by others once its lease has run out; with `durability=shipped` all is there."""
    topic = cluster.create(**{"tidelog.durability": "shipped"})
    producing = Producing(cluster, topic)
    producing.more()
    victim = cluster.leaders(topic)[0]
    cluster.kill(victim)
    until(lambda: not {victim, ""} & set(cluster.leaders(topic).values()))
    producing.more()
    check_everything_is_there(cluster, producing)
    decided = [one for rounds in cluster.operations.decisions() for one in rounds.decisions]
    assert f"{victim} is not alive" in {one.reason for one in decided if one.kind == "failover"}
    until(lambda: cluster.operations.status().unassigned == 0)  # those of other topics may come a round later
    assert cluster.operations.status().nodes == 2
    cluster.start(victim)
    until(lambda: cluster.operations.status().nodes == 3)


def test_every_partition_of_a_killed_node_acknowledges_again(cluster: DevCluster) -> None:
    """All of them, while it is dead: the others open in one go what it had."""
    topic = cluster.create_of(48)
    until(lambda: set(cluster.leaders(topic).values()) <= set(cluster.nodes))
    acknowledged: list[tuple[int | None, str | None]] = []
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "acks": "all", **QUIET})

    def send_to(partitions: list[int]) -> None:
        acknowledged.clear()
        for number in partitions:
            producer.produce(
                topic,
                b"value",
                partition=number,
                on_delivery=lambda error, message: acknowledged.append(
                    (message.partition(), None if error is None else str(error))
                ),
            )
        assert producer.flush(WAIT_SECONDS) == 0
        assert sorted(acknowledged) == [(number, None) for number in partitions]

    send_to(list(range(48)))
    victim = cluster.leaders(topic)[0]
    theirs = [number for number, node in cluster.leaders(topic).items() if node == victim]
    assert len(theirs) >= 48 // 3 - 1
    cluster.kill(victim)
    send_to(theirs)
    assert victim not in cluster.leaders(topic).values()
    cluster.start(victim)
    until(lambda: cluster.operations.status().nodes == 3)


def test_an_older_node_serves_until_the_version_gate_is_raised(cluster: DevCluster) -> None:
    """A rolling upgrade: nodes of two versions share the work. When older ones are refused, what one has goes elsewhere
    without an error, it does not join again, and upgraded it does."""
    old = "n2"
    topic = cluster.create()
    producing = Producing(cluster, topic)
    producing.more()
    cluster.shut_down(old)
    cluster.start(old, "0.0.9")
    until(lambda: {one["name"]: one["version"] for one in cluster.command("nodes")}[old] == "0.0.9")
    cluster.move(topic, 0, old)
    producing.more()
    cluster.command("settings", "minimum_version=0.1")
    assert cluster.operations.until(cluster.operations.is_empty(old), WAIT_SECONDS)
    producing.more()
    decided = [one for rounds in cluster.operations.decisions() for one in rounds.decisions]
    assert f"{old} has version 0.0.9, older than 0.1" in {one.reason for one in decided if one.kind == "drain"}
    cluster.shut_down(old)
    with pytest.raises(StoreUnavailableError, match="did not start"):
        cluster.start(old, "0.0.9")
    assert "this is tidelog 0.0.9, the cluster requires 0.1" in (cluster.directory / f"{old}.log").read_text()
    cluster.start(old)
    until(lambda: cluster.operations.status().nodes == 3)
    cluster.move(topic, 0, old)
    producing.more()
    check_everything_is_there(cluster, producing)
    cluster.command("settings", "minimum_version=")


def send(cluster: DevCluster, topic: str, numbers: range) -> None:
    """To partition 0, each acknowledged before the next one is sent."""
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "acks": "all", **QUIET})
    for number in numbers:
        producer.produce(topic, b"%d" % number, partition=0)
        assert producer.flush(WAIT_SECONDS) == 0


def test_tail_that_was_not_shipped_is_there_again_with_its_node(cluster: DevCluster) -> None:
    """With `durability=synced` it is missing while its node is dead. Nothing was written since: the node goes on with
    it, at its offsets and in order, when it has the partition again."""
    topic = cluster.create()
    victim = cluster.leaders(topic)[0]
    send(cluster, topic, range(20))
    with cluster.without_bucket():
        send(cluster, topic, range(20, 60))
        cluster.kill(victim)
    until(lambda: cluster.leaders(topic)[0] not in {victim, ""})
    assert cluster.end(topic, 0) <= 20
    cluster.start(victim)
    until(lambda: cluster.operations.status().nodes == 3)
    cluster.move(topic, 0, victim)
    send(cluster, topic, range(60, 80))
    assert consumed(cluster, topic, {0: 80})[0] == [(number, number) for number in range(80)]


def keyed(cluster: DevCluster, topic: str, numbers: range, partitions: list[int]) -> None:
    """To these partitions, each acknowledged."""
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "acks": "all", **QUIET})
    for number in numbers:
        for partition in partitions:
            producer.produce(topic, b"%d" % number, key=b"k%d" % partition, partition=partition)
    assert producer.flush(WAIT_SECONDS) == 0


def test_tails_of_all_partitions_are_rescued_through_the_cluster(cluster: DevCluster) -> None:
    """Others have written since, so the tails of a dead node are appended again: each message to the partition that it
    came from, whoever serves that, once, and into a new topic that every node knows. `--output` works beside the
    node, and nothing is appended behind the back of the others."""
    topic = cluster.create()
    name = topic.replace(".", "/", 1)
    victim = cluster.leaders(topic)[0]
    for number, node in cluster.leaders(topic).items():
        if number < 3 and node != victim:
            cluster.move(topic, number, victim)
    theirs = [number for number, node in cluster.leaders(topic).items() if node == victim]
    assert len(theirs) >= 3
    keyed(cluster, topic, range(20), theirs)
    for number in theirs:
        until(lambda number=number: cluster.end(topic, number) == 20)  # type: ignore[misc]
    cluster.said_at(victim, "topic", "ship", name)
    with cluster.without_bucket():
        keyed(cluster, topic, range(100, 140), theirs)
        cluster.kill(victim)
    until(lambda: not {victim, ""} & set(cluster.leaders(topic).values()))
    keyed(cluster, topic, range(20, 30), theirs)
    found = cluster.said_at(victim, "topic", "rescue", name)  # in its directory, while it is dead
    assert [(one["partition"], one["messages"]) for one in found] == [(number, 40) for number in theirs]
    refused = cluster.run_at(victim, "topic", "rescue", name, "--into", f"{name}-alone")
    assert (refused.returncode != 0, "Start the node of this directory" in refused.stderr) == (True, True)
    cluster.start(victim)
    until(lambda: cluster.operations.status().nodes == 3)

    tails = cluster.said_at(victim, "topic", "rescue", name)
    assert [(one["partition"], one["messages"], one["node"]) for one in tails] == [(n, 40, victim) for n in theirs]
    output = cluster.directory / "tail.jsonl"
    assert cluster.said_at(victim, "topic", "rescue", name, "--output", str(output))["messages"] == 40 * len(theirs)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [int(one["value"]) for one in lines if one["partition"] == theirs[0]] == list(range(100, 140))

    saved = f"{name}-saved"
    done = cluster.said_at(victim, "topic", "rescue", name, "--into", saved)
    assert [(one["partition"], one["appended"]) for one in done] == [(number, 40) for number in theirs]
    again = cluster.said_at(victim, "topic", "rescue", name, "--into", saved)
    assert [(one["appended"], one["already_there"]) for one in again] == [(0, 40)] * len(theirs)
    other = next(node for node in cluster.nodes if node != victim)
    assert saved in [one["topic"] for one in cluster.command("topics")]
    found = consumed(cluster, saved.replace("/", ".", 1), dict.fromkeys(theirs, 40))
    assert {number: [value for _, value in some] for number, some in found.items() if some} == {
        number: list(range(100, 140)) for number in theirs
    }

    for node in (victim, other):  # whichever node does it: the tails are on the disk of one
        cluster.said_at(node, "topic", "rescue", name, "--into", name)
    found = consumed(cluster, topic, dict.fromkeys(theirs, 70))
    wanted = [*range(30), *range(100, 140)]
    assert {number: [value for _, value in some] for number, some in found.items() if some} == dict.fromkeys(
        theirs, wanted
    )


def test_load_of_a_partition_has_what_consumers_get(cluster: DevCluster) -> None:
    """A partition that is only read is no idle one: balance moves by what goes out of it, too."""
    topic = cluster.create()
    producer = Producer({"bootstrap.servers": cluster.bootstrap, **QUIET})
    for _ in range(200):
        producer.produce(topic, b"1" * 3000, partition=0)
    assert producer.flush(WAIT_SECONDS) == 0
    key = f"{topic.replace('.', '/')}/0"

    def goes_out() -> bool:
        consumed(cluster, topic, {0: 200})
        load = cluster.operations.loads().get(cluster.leaders(topic)[0])
        if load is None:
            return False  # a node that has just come back has not reported yet
        found = load.partitions.get(key, Load())
        return found.bytes_out > found.bytes_in and found.messages_out > found.messages_in <= load.total.messages_out

    until(goes_out)


def test_commands_show_a_cluster_and_move_what_it_has(cluster: DevCluster) -> None:
    """`status`, `engines`, `restore-point`, `decisions`, `balance` and `move` beside nodes that run."""
    topic = cluster.create()
    name = topic.replace(".", "/", 1)
    until(lambda: cluster.operations.status().unassigned == 0)
    status = cluster.command("status")
    assert (status["nodes"], status["leader"] in cluster.nodes, status["partitions"] >= 6) == (3, True, True)
    source = cluster.leaders(topic)[0]
    to = next(node for node in cluster.nodes if node != source)
    moved = cluster.command("move", name, "0", to, "--pin", "--wait", str(WAIT_SECONDS))
    assert moved == {"topic": name, "partition": 0, "node": to, "done": True}
    until(lambda: cluster.leaders(topic)[0] == to)
    rows = cluster.command("topics", name)
    assert [(row["node"], row["pin"]) for row in rows if row["partition"] == 0] == [(to, to)]
    decided = [one for one in cluster.command("decisions") if one["what"] == f"{name}/0"]
    assert [(one["kind"], one["from"], one["to"]) for one in decided[-1:]] == [("move", source, to)]
    assert decided[-1]["reason"].startswith("asked for by ")
    assert cluster.command("balance", "--wait", str(WAIT_SECONDS))["done"] is True
    assert cluster.leaders(topic)[0] == to  # pinned
    cluster.command("move", name, "0", "--unpin")

    cluster.command("add-engine", "commands")
    until(lambda: [one.state for one in cluster.operations.engines() if one.name == "commands"] == ["assigned"])
    found = {one["name"]: one for one in cluster.command("engines")}["commands"]
    assert (found["node"] in cluster.nodes, found["state"], found["store"]) == (True, "assigned", None)
    cluster.command("remove-engine", "commands")
    assert "commands" not in [one.name for one in cluster.operations.engines()]

    send(cluster, topic, range(5))
    with cluster.without_bucket():
        send(cluster, topic, range(5, 25))
        until(lambda: any(one.topic == name and one.messages >= 20 for one in cluster.operations.restore_point()))
        found = next(row for row in cluster.command("restore-point") if row["topic"] == name)
        assert (found["node"], found["is_alive"], found["to_rescue"]) == (to, True, False)
    until(lambda: name not in [one.topic for one in cluster.operations.restore_point()])


def name_at(cluster: DevCluster, node: str, kind: str) -> str:
    """Of a group or a transactional id whose coordinator this node is."""
    slots = cluster.operations.state().coordinators.slots
    return next(name for number in range(10_000) if slots[slot_of(name := f"{kind}-{number}")] == node)


def read_by(cluster: DevCluster, group: str, topic: str, count: int) -> list[int]:
    """So many committed messages of partition 0 as a member of a group, which commits them."""
    settings = {"group.id": group, "auto.offset.reset": "earliest", "enable.auto.commit": False}
    consumer = Consumer(
        {"bootstrap.servers": cluster.bootstrap, "isolation.level": "read_committed", **settings, **QUIET}
    )
    found: list[int] = []

    def more() -> bool:
        for message in consumer.consume(count - len(found), 0.5):
            value = message.value()
            if message.error() is None and value is not None:
                found.append(int(value))
        return len(found) == count

    def committed() -> bool:
        try:
            consumer.commit(asynchronous=False)
        except KafkaException:
            return False  # its coordinator is on the way to another node
        return True

    consumer.subscribe([topic])
    until(more)
    until(committed)
    consumer.close()
    return found


def test_groups_transactions_and_accounts_outlive_their_node(cluster: DevCluster) -> None:
    """The node that coordinates a group and an open transaction is killed: the group goes on from its offsets, the
    transaction ends as its producer decides, and a token and a grant that were made there are known to the others."""
    topic = cluster.create(**{"tidelog.durability": "shipped"})
    name = topic.replace(".", "/", 1)
    until(lambda: cluster.operations.status().unassigned == 0)
    victim = cluster.leaders(topic)[0]
    other = next(node for node in cluster.nodes if node != victim)
    group = name_at(cluster, victim, f"group-{topic}")
    settings = {"transactional.id": name_at(cluster, victim, f"id-{topic}"), "transaction.timeout.ms": 600_000}
    producer = Producer({"bootstrap.servers": cluster.bootstrap, **settings, **QUIET})
    producer.init_transactions(WAIT_SECONDS)
    producer.begin_transaction()
    for number in range(10):
        producer.produce(topic, b"%d" % number, partition=0)
    producer.commit_transaction(WAIT_SECONDS)
    assert read_by(cluster, group, topic, 10) == list(range(10))
    token = cluster.said_at(victim, "auth", "token", "create", "alice")
    cluster.said_at(victim, "auth", "grant", "alice", "read", f"topic:{name}")
    producer.begin_transaction()
    for number in range(10, 15):
        producer.produce(topic, b"%d" % number, partition=0)
    assert producer.flush(WAIT_SECONDS) == 0

    cluster.kill(victim)
    until(lambda: victim not in cluster.operations.state().coordinators.slots)
    until(lambda: not {victim, ""} & set(cluster.leaders(topic).values()))
    tokens = cluster.said_at(other, "auth", "token", "list")
    assert [one["user"] for one in tokens if one["id"] == token["id"]] == ["alice"]
    assert f"topic:{name}" in [one["resource"] for one in cluster.said_at(other, "auth", "list", "alice")]

    def is_committed() -> bool:
        try:
            producer.commit_transaction(10)
        except KafkaException as error:
            if not error.args[0].retriable():
                raise
            return False
        return True

    until(is_committed)
    assert read_by(cluster, group, topic, 5) == list(range(10, 15))
    cluster.start(victim)
    until(lambda: cluster.operations.status().nodes == 3)
