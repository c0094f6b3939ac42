"""A rolling upgrade with the program of an earlier commit: real nodes of both share a cluster, under a producer.

UPGRADE_FROM says which commit (without it the first one that needs the packages of today). Without such a history
there is nothing to upgrade from: pytest says that the parameters are empty.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cluster.processes import WAIT_SECONDS, DevCluster, Producing, until
from tests.cluster.test_nodes import LEASE_SECONDS, check_everything_is_there

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ("-G^(dependencies|serve|cluster) = ", "--", "pyproject.toml")
"""The last change of what a node needs: the first commit that runs with what is installed."""
OLD = "n4"


def git(*words: str) -> str:
    """What git says; nothing where it fails, or there is none."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def earlier_commits() -> list[str]:
    """One, or none: a source archive has no history, and a shallow clone may end here."""
    chosen = os.environ.get("UPGRADE_FROM")
    commit = git("rev-parse", f"{chosen}^{{commit}}") if chosen else git("log", "-1", "--format=%H", *REQUIREMENTS)
    return [] if commit in ("", git("rev-parse", "HEAD")) else [commit]


def built(commit: str, directory: Path) -> Path:
    """The source of a commit, with its extension."""
    directory.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(directory)], input=archive.stdout, check=True)
    build = [sys.executable, "setup.py", "--quiet", "build_py", "build_ext", "--inplace"]
    subprocess.run(build, cwd=directory, check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(directory / "src")}
    question = "import tidelog, tidelog._native; print(tidelog.__file__, tidelog._native.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", question], cwd=directory, env=environment, capture_output=True, text=True, check=True
    )
    assert all(path.startswith(str(directory)) for path in found.stdout.split()), found.stdout
    return directory


@pytest.mark.long
@pytest.mark.parametrize("commit", earlier_commits())
def test_a_node_of_an_earlier_commit_serves_beside_new_ones_and_is_upgraded(tmp_path: Path, commit: str) -> None:
    """It takes partitions from new nodes and gives them back, leads if it comes to that, and goes on upgraded on its
    directory: producers see no error, and nothing is lost, doubled or out of order."""
    source = built(commit, tmp_path / "earlier")
    cluster = DevCluster(tmp_path / "cluster", LEASE_SECONDS)
    try:
        cluster.start(OLD, source=source)
        until(lambda: cluster.operations.status().nodes == 4)
        cluster.shut_down("n3")
        topic = cluster.create(**{"tidelog.durability": "shipped"})
        until(lambda: set(cluster.leaders(topic).values()) <= set(cluster.nodes))
        until(lambda: cluster.operations.status().moving == 0)
        producing = Producing(cluster, topic)
        producing.more()
        for partition in range(3):
            cluster.move(topic, partition, OLD)
        producing.more()
        leader = cluster.operations.status().leader
        if leader not in (OLD, None):
            cluster.shut_down(leader)  # the old one may be the next
            until(lambda: cluster.operations.status().leader not in (leader, None))
            producing.more()
            cluster.start(leader)
            until(lambda: cluster.operations.status().nodes == 3)
        new = next(node for node in ("n1", "n2") if node in cluster.nodes)
        cluster.move(topic, 0, new)
        producing.more()
        cluster.shut_down(OLD)
        until(lambda: OLD not in cluster.leaders(topic).values())
        producing.more()
        cluster.start(OLD)
        until(lambda: cluster.operations.status().nodes == 3)
        cluster.move(topic, 1, OLD)
        producing.more()
        check_everything_is_there(cluster, producing)
        assert cluster.operations.until(lambda state: OLD in state.nodes, WAIT_SECONDS)
    finally:
        cluster.stop()
