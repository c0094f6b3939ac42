"""Bringing what was committed into its topic: beside an owner, without one, and after somebody died doing so."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.staging.staged_commits import hand_over

import tidelog
from tidelog.cold.catalog import Catalog
from tidelog.errors import IngestPendingError, InputError
from tidelog.pipeline import ingest as handing
from tidelog.pipeline.address import Root, find_root
from tidelog.staging import rows as staging_rows
from tidelog.staging.area import StagingArea
from tidelog.store.keys import TopicKeys
from tidelog.store.metadata.open import open_metadata_store
from tidelog.store.urls import open_store
from tidelog.topics.ingest import staging_url
from tidelog.topics.message import encode_message
from tidelog.topics.names import parse_topic_name

NAME = "shop/orders"
TOPIC = parse_topic_name(NAME)
KEYS = TopicKeys("shop", "orders")
SOON: dict[str, Any] = {"ingest_check_seconds": 0.05}


@contextlib.contextmanager
def bucket_area(directory: Path) -> Iterator[StagingArea]:
    objects = open_store(f"file://{directory}/bucket")
    with open_metadata_store("bucket", objects) as metadata:
        yield StagingArea(objects, metadata, KEYS)


@contextlib.contextmanager
def local_area(directory: Path) -> Iterator[StagingArea]:
    objects = open_store(staging_url(directory))
    with open_metadata_store(f"sqlite://{directory}/metadata.db") as metadata:
        yield StagingArea(objects, metadata, KEYS)


def bucket(directory: Path) -> Root:
    return find_root(f"file://{directory}/bucket", lease_seconds=1)


def payloads(*values: bytes) -> list[bytes]:
    return [encode_message(value, None, {}, 1) for value in values]


def values(root: Root) -> Sequence[bytes]:
    with root.open() as log:
        return [message.value or b"" for message in log.topic(NAME).read()]


def owner_of(directory: Path) -> str:
    objects = open_store(f"file://{directory}/bucket")
    with open_metadata_store("bucket", objects) as metadata:
        found = Catalog(metadata, KEYS).owner()
        assert found is not None
        return found[0].node


def test_a_directory_that_nobody_has_open(tmp_path: Path) -> None:
    """It is opened for it, made if need be, and closed again."""
    root = find_root(tmp_path / "data")
    with local_area(tmp_path / "data") as area:
        hand_over(area, "etl", 0, payloads(b"a"))
        assert handing.ingest(root, TOPIC, area, "etl", 0, 30).first_offset == 0
        with tidelog.open(tmp_path / "data") as log:
            log.topic(NAME).append(b"mine")
        hand_over(area, "etl", 1, payloads(b"b"))
        assert handing.ingest(root, TOPIC, area, "etl", 1, 30).first_offset == 2
    assert values(root) == [b"a", b"mine", b"b"]


def test_a_directory_with_a_store_ships_it_too(tmp_path: Path) -> None:
    """Who reads the store alone sees it."""
    with tidelog.open(tmp_path / "data", store=f"file://{tmp_path}/bucket", metadata="bucket") as log:
        log.topic(NAME).append(b"mine")
    with bucket_area(tmp_path) as area:
        hand_over(area, "etl", 0, payloads(b"a"))
        handing.ingest(find_root(tmp_path / "data"), TOPIC, area, "etl", 0, 30)
        assert list(area._objects.list(KEYS.staging_prefix)) == []
    assert values(bucket(tmp_path)) == [b"mine", b"a"]


def test_a_bucket_whose_topic_nobody_ever_owned(tmp_path: Path) -> None:
    """Written to again and again, and then taken over by a real owner."""
    with bucket_area(tmp_path) as area:
        for version in range(3):
            hand_over(area, "etl", version, payloads(b"%d" % version))
            assert handing.ingest(bucket(tmp_path), TOPIC, area, "etl", version, 30).first_offset == version
        assert list(area._objects.list(KEYS.staging_prefix)) == []
    with tidelog.open(tmp_path / "data", store=f"file://{tmp_path}/bucket", metadata="bucket") as log:
        assert [message.value for message in log.topic(NAME).read()] == [b"0", b"1", b"2"]
        assert log.topic(NAME).append(b"mine") == 3


def test_a_topic_that_was_sealed(tmp_path: Path) -> None:
    """Its owner has let go of it."""
    with tidelog.open(tmp_path / "data", store=f"file://{tmp_path}/bucket", metadata="bucket") as log:
        log.topic(NAME).append(b"mine")
        log.topic(NAME).seal()
    with bucket_area(tmp_path) as area:
        hand_over(area, "etl", 0, payloads(b"a"))
        handing.ingest(bucket(tmp_path), TOPIC, area, "etl", 0, 30)
    assert values(bucket(tmp_path)) == [b"mine", b"a"]


@pytest.mark.parametrize("place", ["bucket", "another directory"])
def test_an_owner_that_runs_takes_it_in(tmp_path: Path, place: str) -> None:
    """It keeps its topic, whoever writes from wherever."""
    store: dict[str, Any] = {"store": f"file://{tmp_path}/bucket", "metadata": "bucket"}
    with tidelog.open(tmp_path / "other", **store):
        pass
    root = bucket(tmp_path) if place == "bucket" else find_root(tmp_path / "other")
    with tidelog.open(tmp_path / "data", **store, **SOON) as log, bucket_area(tmp_path) as area:
        log.topic(NAME).append(b"mine")
        owner = owner_of(tmp_path)
        hand_over(area, "etl", 0, payloads(b"a"))
        handing.ingest(root, TOPIC, area, "etl", 0, 30)
        assert log.topic(NAME).append(b"more") == 2
        assert owner_of(tmp_path) == owner


def test_an_owner_that_does_not_run_is_waited_for(tmp_path: Path) -> None:
    """What is on its disk may be the end of the topic. The error says that the rows are safe, and they come in then."""
    store: dict[str, Any] = {"store": f"file://{tmp_path}/bucket", "metadata": "bucket"}
    with tidelog.open(tmp_path / "data", **store) as log:
        log.topic(NAME).append(b"unshipped")
    with bucket_area(tmp_path) as area:
        hand_over(area, "etl", 0, payloads(b"a"))
        with pytest.raises(IngestPendingError, match="Do not write it again"):
            handing.ingest(bucket(tmp_path), TOPIC, area, "etl", 0, 0.1)
    with tidelog.open(tmp_path / "data") as log:
        assert [message.value for message in log.topic(NAME).read()] == [b"unshipped", b"a"]


def test_a_topic_that_keeps_nothing_is_refused(tmp_path: Path) -> None:
    """Nothing can be handed over to it."""
    with tidelog.open(tmp_path / "data") as log:
        log.topic(NAME, reliable=False)
    with local_area(tmp_path / "data") as area:
        hand_over(area, "etl", 0, payloads(b"a"))
        with pytest.raises(InputError, match="reliable=False"):
            handing.ingest(find_root(tmp_path / "data"), TOPIC, area, "etl", 0, 30)


def test_several_writers_without_an_owner(tmp_path: Path) -> None:
    """Each takes in what is there, or waits for the one who does; each row is there once."""
    errors: list[BaseException] = []

    def write(app: str) -> None:
        try:
            with bucket_area(tmp_path) as area:
                for version in range(3):
                    hand_over(area, app, version, payloads(f"{app}-{version}".encode()))
                    handing.ingest(bucket(tmp_path), TOPIC, area, app, version, 60)
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)

    threads = [threading.Thread(target=write, args=(app,)) for app in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == []
    found = values(bucket(tmp_path))
    assert sorted(found) == sorted(b"%s-%d" % (app, version) for app in (b"a", b"b", b"c") for version in range(3))


STEPS = ("settle_in", "place", "append_rows", "finish", "publish", "clear_away", "seal")
# A writer for each step, killed there; forked, because importing takes longer than what they do.
WRITERS = """
    import os, signal, sys
    from pathlib import Path
    from tests.pipeline.sink.test_hand_over import STEPS
    from tests.pipeline.sink.test_hand_over import TOPIC
    from tests.pipeline.sink.test_hand_over import bucket
    from tests.pipeline.sink.test_hand_over import bucket_area
    from tests.pipeline.sink.test_hand_over import payloads
    from tests.staging.staged_commits import hand_over
    from tidelog.pipeline import ingest as handing
    from tidelog.cold import tiered_log
    from tidelog.staging.ingest import Ingester
    from tidelog.cold.ownership import OwnedCatalog

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    def write(place, version, *values):
        with bucket_area(place) as area:
            hand_over(area, "etl", version, payloads(*values))
            handing.ingest(bucket(place), TOPIC, area, "etl", version, 30)

    def write_until(where):
        write(Path(sys.argv[1]) / where, 0, b"a")
        kind = {"place": Ingester, "append_rows": Ingester, "finish": Ingester, "clear_away": Ingester}
        setattr(kind.get(where, OwnedCatalog), ("_" if where in kind else "") + where, die)
        write(Path(sys.argv[1]) / where, 1, b"b", b"c")

    children = {}
    for where in STEPS:
        children[where] = os.fork()
        if not children[where]:
            try:
                write_until(where)
            finally:
                os._exit(1)
    for where, child in children.items():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, where
"""


@pytest.fixture(scope="module")
def killed_writers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each step a directory in which a writer was killed there."""
    root, place = Path(__file__).resolve().parents[3], tmp_path_factory.mktemp("killed")
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WRITERS), str(place)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])},
        timeout=120,
        check=True,
    )
    return place


@pytest.mark.parametrize("where", STEPS)
def test_one_who_is_killed_is_followed_by_the_next(killed_writers: Path, where: str) -> None:
    """Whatever it had begun: the next writer, of the same version or another, goes on when its lease has run out."""
    place = killed_writers / where
    with bucket_area(place) as area:
        assert hand_over(area, "etl", 1, payloads(b"b", b"c")) == "already committed"
        handing.ingest(bucket(place), TOPIC, area, "etl", 1, 30)
        hand_over(area, "etl", 2, payloads(b"d"))
        handing.ingest(bucket(place), TOPIC, area, "etl", 2, 30)
    assert values(bucket(place)) == [b"a", b"b", b"c", b"d"]


def test_a_job_that_owns_a_topic_for_a_moment_reads_rows_once_and_syncs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else appends there, and what is staged stays so until it is in the bucket."""
    monkeypatch.setattr(staging_rows, "_KEPT_BYTES", 0)
    monkeypatch.setattr(staging_rows.StagedRows, "verify", lambda *_: pytest.fail("rows are looked through twice"))
    synced: list[Path] = []
    real = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    (tmp_path / "bucket").mkdir()
    with bucket_area(tmp_path) as area:
        hand_over(area, "etl", 0, payloads(b"a", b"b", b"c"), parts=2)
    assert handing.ingest_unowned(bucket(tmp_path), TOPIC)
    assert values(bucket(tmp_path)) == [b"a", b"b", b"c"]
    assert not [path for path in synced if tmp_path not in path.parents]
