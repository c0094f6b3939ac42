"""The step of the demo with a cluster: three nodes, one of which is killed, and nothing that was acknowledged is lost.

Invariant: the cluster is `tidelog cluster dev`, a process of its own in the demo's directory, and ends with the step.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tidelog.cli.cluster.dev import INSTALL_HINT, etcd_program
from tidelog.cli.demo.steps import Step
from tidelog.errors import InternalError

TOPIC = "demo/shipped"
COUNT = 300
PARTITIONS = 3
_LEASE_SECONDS = 2
_WAIT_SECONDS = 60.0


def why_not() -> str | None:
    """What is missing for this part; None when nothing is."""
    is_there = etcd_program() is not None
    modules = ("urllib3", "cramjam", "httptools", "websockets")
    if is_there and all(importlib.util.find_spec(module) is not None for module in modules):
        return None
    return f"it needs etcd: {INSTALL_HINT}"


@contextlib.contextmanager
def three_nodes(directory: Path) -> Iterator[list[dict[str, Any]]]:
    """The nodes of a cluster while the block runs: `name`, `http` and `pid` of each."""
    command = [sys.executable, "-m", "tidelog.cli.main", "cluster", "dev", "--nodes", "3", "--json"]
    command += ["--lease", str(_LEASE_SECONDS), "--dir", str(directory)]
    with (directory.parent / f"{directory.name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise InternalError(f"the cluster of the demo did not start: see {directory}.log")
        yield json.loads(line)["nodes"]
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()


def lose_a_node(directory: Path) -> Step:
    """Appends to a topic whose messages are acknowledged by the bucket, kills a node with its partition, and reads."""
    import tidelog

    step = Step()
    with three_nodes(directory) as nodes, tidelog.connect(nodes[0]["http"], timeout=_WAIT_SECONDS) as client:
        topic: Any = client.topic(TOPIC, partitions=PARTITIONS, durability="shipped")
        values = [b'{"order": %d}' % number for number in range(2 * COUNT)]
        acknowledged = topic.append_many(_keyed(values[:COUNT]), sync=True)
        owners = {one.partition: one.node for one in client._bridge.wait(topic._state()).partitions}
        victim = next(node for node in nodes[1:] if node["name"] in owners.values())
        os.kill(victim["pid"], signal.SIGKILL)
        killed = time.monotonic()
        acknowledged += topic.append_many(_keyed(values[COUNT:]), sync=True)
        seconds = time.monotonic() - killed
        found = [message.value for message in topic.read()]
    partitions = sum(owner == victim["name"] for owner in owners.values())
    step.findings = [
        f"{len({*owners.values()})} nodes had {PARTITIONS} partitions; {victim['name']} was killed with {partitions}",
        f"the next {COUNT} messages were acknowledged {seconds:.1f} s after that, by the other nodes",
    ]
    step.numbers = {"cluster_messages": len(found), "failover_seconds": round(seconds, 1)}
    step.proofs["the cluster acknowledged every message, with a node lost in between"] = len(acknowledged) == 2 * COUNT
    step.proofs["nothing that the bucket had acknowledged is lost with a node"] = sorted(found) == sorted(values)
    return step


def _keyed(values: list[bytes]) -> list[Any]:
    import tidelog

    return [tidelog.Message(value, b"%d" % number) for number, value in enumerate(values)]
