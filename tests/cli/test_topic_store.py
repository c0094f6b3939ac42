"""The cold tier from the command line: what is in the store is seen, shipped, handed over, swept and given back."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from tests.cli.conftest import Cli
from tests.servers import S3Server

import tidelog
from tidelog.cli.topic.group import change_in_catalog, own_settings
from tidelog.cold.catalog import Catalog
from tidelog.log.binding import BINDING_BYTES
from tidelog.log.frame import encode_many, scan
from tidelog.store.keys import TopicKeys
from tidelog.testing import FaultyMetadata

LINES = b"".join(b"%d\n" % number for number in range(200))
COUNT = 200


@pytest.fixture
def store(tmp_path: Path) -> list[str]:
    """The options of a store with its catalog."""
    return ["--store", f"file://{tmp_path}/store", "--metadata", "bucket"]


@pytest.fixture
def filled(cli: Cli, store: list[str]) -> list[str]:
    """A topic `a/b` in ./data, all of it shipped; the options that name its store."""
    assert cli("produce", "a/b", "--no-ship", *store, stdin=LINES).code == 0
    assert cli("topic", "ship", "a/b").code == 0
    return store


def objects_in(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "store").rglob("data-*.tlog"))


def described(cli: Cli, topic: str, *options: str) -> dict[str, object]:
    found = cli("topic", "describe", topic, "--json", *options).json
    assert isinstance(found, dict)
    return found


# Looking


def test_a_bucket_alone_is_enough_to_look(cli: Cli, filled: list[str], tmp_path: Path) -> None:
    """Listing, describing, reading and checking need no directory where store and catalog are named."""
    shutil.rmtree(tmp_path / "data")
    (row,) = cli("topic", "list", "--json", *filled).json
    assert (row["topic"], row["shipped_offset"], row["messages"], row["files"], row["state"]) == (
        *("a/b", COUNT, COUNT, 0),
        "ok",
    )
    assert described(cli, "a/b", *filled)["hot_start_offset"] == COUNT
    assert cli("consume", "a/b", *filled).out == LINES
    assert cli("verify", "--cold", *filled).code == 0
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("command", ["inspect", "repair"])
def test_what_is_about_files_needs_some(cli: Cli, filled: list[str], command: str) -> None:
    """A topic that is in the store alone has none here; the hint says how to check it there."""
    result = cli(command, "a/b", "-d", "nowhere", *filled)
    assert (result.code, "verify --cold" in result.err) == (3, True)


def test_a_store_without_a_word_about_its_catalog(cli: Cli, filled: list[str]) -> None:
    """Without a directory the catalog has to be named, and the error says how."""
    result = cli("topic", "list", "-d", "nowhere", *filled[:2])
    assert result.code == 3
    assert "--metadata bucket" in result.err


def test_the_store_comes_from_variables_too(
    cli: Cli, filled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TIDELOG_STORE and TIDELOG_METADATA say the same as the options."""
    shutil.rmtree(tmp_path / "data")
    monkeypatch.setenv("TIDELOG_STORE", filled[1])
    monkeypatch.setenv("TIDELOG_METADATA", filled[3])
    assert cli("consume", "a/b", "--from", "-1").out == b"199\n"


@pytest.mark.usefixtures("filled")
def test_describe_says_where_a_topic_stands(cli: Cli, tmp_path: Path) -> None:
    """Mode, store, owner, epoch, objects and lag."""
    cli("produce", "a/b", "--no-ship", stdin=b"one more\n")
    found = described(cli, "a/b")
    (path,) = objects_in(tmp_path)
    assert (found["mode"], found["store"], found["metadata"]) == ("shared_fs", f"file://{tmp_path}/store", "bucket")
    assert (found["objects"], found["object_bytes"]) == (1, path.stat().st_size)
    assert (found["lag_messages"], found["sealed"], found["is_owner_here"]) == (1, False, True)
    assert (found["shipped_offset"], found["next_offset"], found["oldest_unshipped"]) == (
        *(COUNT, COUNT + 1),
        found["last_timestamp"],
    )


# Settings


def test_settings_of_a_topic(cli: Cli, store: list[str]) -> None:
    """They are given with units when it is made, changed later, taken back, and shown."""
    cli("topic", "create", "a/b", "--set", "retention_seconds=7d", "--set", "ship_compression=zstd", *store)
    assert described(cli, "a/b")["settings"] == {"retention_seconds": 7 * 86400, "ship_compression": "zstd"}
    cli("topic", "set", "a/b", "retention_bytes=1GiB", "retention_seconds=default")
    assert described(cli, "a/b")["settings"] == {"retention_bytes": 1 << 30, "ship_compression": "zstd"}
    assert cli("produce", "a/b", "--no-ship", stdin=LINES).code == 0
    assert described(cli, "a/b")["settings"] == {"retention_bytes": 1 << 30, "ship_compression": "zstd"}


def test_settings_without_a_store(cli: Cli) -> None:
    """In local mode they are kept beside the topic's files."""
    cli("topic", "create", "a/b")
    assert cli("topic", "set", "a/b", "retention_seconds=1h", "--json").json["settings"] == {"retention_seconds": 3600}
    assert described(cli, "a/b")["settings"] == {"retention_seconds": 3600}


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("retention_seconds=soon", "retention_seconds must be"),
        ("retention=1", "retention is not a setting of a topic"),
        ("fsync_interval_ms=5", "fsync_interval_ms is not a setting of a topic"),
        ("retention_seconds", "NAME=VALUE"),
        ("ship_compression=lzma", "none, zstd"),
    ],
)
def test_settings_that_cannot_be(cli: Cli, setting: str, text: str, tmp_path: Path) -> None:
    """A wrong name or value is refused before anything is made."""
    result = cli("topic", "create", "a/b", "--set", setting)
    assert (result.code, text in result.err) == (2, True), result.err
    assert not (tmp_path / "data").exists()


def test_setting_does_not_disturb_the_owner(cli: Cli, store: list[str]) -> None:
    """Another directory may change the settings: nobody is fenced, and the next opening has them."""
    with tidelog.open("data", store=store[1], metadata="bucket") as log:
        log.topic("a/b").append(b"x")
        assert cli("topic", "set", "a/b", "retention_seconds=1d", "-d", "other", *store).code == 0
        log.topic("a/b").append(b"y", sync=True)
        log.topic("a/b").ship()
    assert described(cli, "a/b")["settings"] == {"retention_seconds": 86400}


def test_two_who_set_at_once_both_count(tmp_path: Path) -> None:
    """The second one adds to what the first has set meanwhile."""
    metadata = FaultyMetadata(multi_key=False)
    other = Catalog(metadata.another_client(), TopicKeys("a", "b"))

    def set_meanwhile(operation: str, key: str) -> None:
        if operation == "commit":
            metadata.on_request = None
            change_in_catalog(other, tmp_path, {"retention_seconds": 60})

    metadata.on_request = set_meanwhile
    own = change_in_catalog(Catalog(metadata, TopicKeys("a", "b")), tmp_path, {"retention_bytes": 1 << 30})
    assert own == {"retention_seconds": 60, "retention_bytes": 1 << 30}
    assert own_settings(other, tmp_path) == own


# Shipping, sealing, pruning


def test_producing_ships_before_it_ends(cli: Cli, store: list[str]) -> None:
    """Loss prevented: a command that runs for a second ended before anything was due, and nothing was ever shipped."""
    assert cli("produce", "a/b", *store, stdin=LINES).code == 0
    (row,) = cli("topic", "list", "--json").json
    assert (row["shipped_offset"], row["next_offset"]) == (COUNT, COUNT)


def test_shipping_says_how_far_it_is(cli: Cli, store: list[str], tmp_path: Path) -> None:
    """All topics of the directory, or one; what is there already is not shipped again."""
    cli("produce", "a/b", "--no-ship", *store, stdin=LINES)
    cli("produce", "a/c", "--no-ship", stdin=b"x\n")
    first, second = cli("topic", "ship", "--all", "--json").json
    assert (first["topic"], first["shipped_offset"], first["messages"], first["objects"]) == ("a/b", COUNT, COUNT, 1)
    assert (second["topic"], second["shipped_offset"]) == ("a/c", 1)
    (again,) = cli("topic", "ship", "a/b", "--json").json
    assert (again["shipped_offset"], again["messages"], again["objects"]) == (COUNT, 0, 0)
    assert len(objects_in(tmp_path)) == 2


@pytest.mark.parametrize("command", [("ship",), ("ship", "a/b", "--all"), ("prune",), ("sweep",)])
def test_topics_have_to_be_named(cli: Cli, filled: list[str], command: tuple[str, ...]) -> None:
    """Names or --all: one of the two."""
    result = cli("topic", *command)
    assert result.code == 2
    assert "--all" in result.err


def test_without_a_store_there_is_nothing_to_ship_to(cli: Cli) -> None:
    """The error says how to name one."""
    cli("produce", "a/b", "--no-ship", stdin=b"x\n")
    for command in (("ship", "a/b"), ("seal", "a/b"), ("sweep", "a/b"), ("rebuild-catalog",)):
        result = cli("topic", *command)
        assert (result.code, "--store" in result.err) == (2, True)


def test_upkeep_does_not_take_a_topic_from_its_owner(cli: Cli, filled: list[str]) -> None:
    """Another node's topic is refused, left out with --all, and taken only on demand."""
    cli("produce", "a/b", "--no-ship", "-d", "other", *filled, stdin=b"from there\n")
    cli("produce", "a/c", "--no-ship", stdin=b"mine\n")
    epoch = described(cli, "a/b")["epoch"]
    for command in (("ship", "a/b"), ("prune", "a/b"), ("seal", "a/b"), ("sweep", "a/b", "--apply", "--drop-lost")):
        result = cli("topic", *command)
        assert (result.code, "--take-over" in result.err) == (4, True)
    shipped = cli("topic", "ship", "--all", "--json")
    assert [row["topic"] for row in shipped.json] == ["a/c"]
    assert "left out:" in shipped.err
    assert described(cli, "a/b")["epoch"] == epoch
    assert cli("topic", "seal", "a/b", "--take-over").code == 0


def test_a_sealed_topic_goes_on_elsewhere(cli: Cli, filled: list[str], tmp_path: Path) -> None:
    """Sealing clears the disk and says where the next owner goes on; that one does."""
    cli("produce", "a/b", "--no-ship", stdin=b"last\n")
    sealed = cli("topic", "seal", "a/b")
    assert (sealed.code, f"continues at offset {COUNT + 1}" in sealed.err) == (0, True)
    assert described(cli, "a/b")["sealed"] is True
    assert not list((tmp_path / "data/a/b").glob("wal.*.log"))
    assert "sealed already" in cli("topic", "seal", "a/b").err
    assert f"offset {COUNT + 1}" in cli("produce", "a/b", "--no-ship", "-d", "other", *filled, stdin=b"next\n").err
    assert cli("consume", "a/b", *filled, "-d", "other").out == LINES + b"last\nnext\n"


def test_pruning_says_what_went(cli: Cli, filled: list[str], tmp_path: Path) -> None:
    """By retention, messages for good; the row says how many, and where the topic begins now."""
    cli("topic", "set", "a/b", "retention_bytes=1")
    (row,) = cli("topic", "prune", "a/b", "--json").json
    assert (row["messages"], row["objects"], row["start_offset"]) == (COUNT, 1, COUNT)
    assert objects_in(tmp_path) == []
    assert cli("consume", "a/b", *filled, "-d", "nowhere").out == b""


def test_deleting_reaches_the_store(cli: Cli, filled: list[str], tmp_path: Path) -> None:
    """A topic of which nothing is on this disk is deleted too, and its objects are counted."""
    result = cli("topic", "delete", "a/b", "-d", "other", *filled, "--yes", "--json")
    assert (result.json["files"], result.json["objects"]) == (0, 1)
    assert objects_in(tmp_path) == []
    assert cli("topic", "list", "-d", "other", "--json").json == []


# Sweeping


def test_sweeping_shows_then_removes(cli: Cli, filled: list[str], tmp_path: Path) -> None:
    """What nobody will publish is shown, removed with --apply, beside the owner and without a claim."""
    (published,) = objects_in(tmp_path)
    orphan = published.with_name(f"data-0-{COUNT - 1}-e1.tlog")
    assert published.name != orphan.name
    shutil.copy(published, orphan)
    planned = cli("topic", "sweep", "a/b")
    assert (planned.code, "--apply" in planned.err) == (0, True)
    assert planned.lines[1].split("\t")[:4] == ["a/b", "remove", "log object", "orphan"]
    assert orphan.exists()
    with tidelog.open("data") as log:
        log.topic("a/b").append(b"x")
        assert cli("topic", "sweep", "--all", "--apply").code == 0
        log.topic("a/b").append(b"y", sync=True)
        log.topic("a/b").ship()
    assert not orphan.exists()
    assert published.exists()


def test_a_lost_object_is_told_and_dropped_on_demand(cli: Cli, filled: list[str], tmp_path: Path) -> None:
    """Exit code 1 and LOST; with --drop-lost the catalog says that it is gone, after a claim that is told."""
    (first,) = objects_in(tmp_path)
    cli("produce", "a/b", "--no-ship", stdin=b"more\n")
    cli("topic", "ship", "a/b")
    first.unlink()
    told = cli("topic", "sweep", "a/b")
    assert (told.code, told.lines[1].split("\t")[1:4]) == (1, ["LOST", "log object", "lost"])
    dropped = cli("topic", "sweep", "a/b", "--apply", "--drop-lost")
    assert "claimed a/b" in dropped.err
    assert cli("topic", "sweep", "a/b").code == 0


def test_a_sweep_names_what_has_no_catalog(cli: Cli, filled: list[str], tmp_path: Path) -> None:
    """Objects of a topic that the catalog does not know are not orphans."""
    shutil.copytree(tmp_path / "store/storage/topics/a/b", tmp_path / "store/storage/topics/a/lost")
    result = cli("topic", "sweep", "--all", "--apply")
    assert "rebuild-catalog a/lost" in result.err
    assert len(objects_in(tmp_path)) == 2


# The bucket alone gives it back


def rebuild_command(hint: str) -> list[str]:
    """The command in an error's hint."""
    found = re.search(r"`tidelog ([^`]+)`", hint)
    assert found is not None
    return shlex.split(found[1])


@pytest.mark.parametrize("metadata", [[], ["--metadata", "bucket"]])
def test_the_bucket_alone_gives_the_topic_back(cli: Cli, tmp_path: Path, metadata: list[str]) -> None:
    """With the disk and the metadata gone, the command that the error names makes everything readable again."""
    store = ["--store", f"file://{tmp_path}/store", *metadata]
    cli("produce", "a/b", "--no-ship", *store, stdin=LINES)
    cli("topic", "ship", "a/b")
    shutil.rmtree(tmp_path / "data")
    shutil.rmtree(tmp_path / "store/tidelog", ignore_errors=True)
    with (
        tidelog.open("data", store=store[1], metadata=metadata[1] if metadata else None) as log,
        pytest.raises(tidelog.DataError) as refused,
    ):
        log.topic("a/b")
    command = rebuild_command(str(refused.value))
    assert cli(*command, "--dir", "data", *store[:2]).code == 0
    assert cli("consume", "a/b").out == LINES
    assert f"offset {COUNT}" in cli("produce", "a/b", "--no-ship", stdin=b"goes on\n").err


def test_the_hint_of_a_command_can_be_pasted(cli: Cli, tmp_path: Path) -> None:
    """From the shell it names the topic and the directory as well."""
    cli("produce", "a/b", "--no-ship", "--store", f"file://{tmp_path}/store", stdin=LINES)
    cli("topic", "ship", "a/b")
    for path in (tmp_path / "data").glob("metadata.db*"):
        path.unlink()
    refused = cli("produce", "a/b", "--no-ship", "--dir", "data", stdin=b"x\n")
    assert refused.code == 5
    assert "topic rebuild-catalog a/b --dir data`" in refused.err


def test_what_was_not_shipped_stays_the_end(cli: Cli, tmp_path: Path) -> None:
    """Where the catalog was in the directory alone, a rebuild keeps what is only on this disk."""
    cli("produce", "a/b", "--no-ship", "--store", f"file://{tmp_path}/store", stdin=LINES)
    cli("topic", "ship", "a/b")
    cli("produce", "a/b", "--no-ship", stdin=b"not shipped\n")
    for path in (tmp_path / "data").glob("metadata.db*"):
        path.unlink()
    (row,) = cli("topic", "rebuild-catalog", "--json").json
    assert (row["topic"], row["next_offset"]) == ("a/b", COUNT)
    assert f"offset {COUNT + 1}" in cli("produce", "a/b", "--no-ship", stdin=b"next\n").err
    assert cli("consume", "a/b").out == LINES + b"not shipped\nnext\n"


def test_a_catalog_that_is_there_is_left_alone(cli: Cli, filled: list[str]) -> None:
    """It is replaced on demand only."""
    assert "nothing was done" in cli("topic", "rebuild-catalog").err
    assert cli("topic", "rebuild-catalog", "a/b").code == 2
    assert cli("topic", "rebuild-catalog", "a/b", "--replace").code == 0
    assert cli("consume", "a/b").out == LINES


def test_a_catalog_is_not_replaced_while_its_owner_lives(cli: Cli, tmp_path: Path) -> None:
    """Loses otherwise: a node that is at work stops, by accident."""
    store = f"file://{tmp_path}/store"
    with tidelog.open("data", store=store, metadata="bucket") as log:
        log.topic("a/b").append(b"first")
        log.topic("a/b").ship()
        named = ["a/b", "-d", "other", "--store", store, "--metadata", "bucket"]
        refused = cli("topic", "rebuild-catalog", *named, "--replace")
        assert (refused.code, "--take-over" in refused.err) == (4, True)
        log.topic("a/b").append(b"second")
        log.topic("a/b").ship()
        assert cli("topic", "rebuild-catalog", *named, "--replace", "--take-over").code == 0
        log.topic("a/b").append(b"third")
        with pytest.raises(tidelog.FencedError):
            log.topic("a/b").ship()


@pytest.mark.parametrize("name", ["owner", "start", f"segments/{0:020}", "segments/cur"])
def test_a_damaged_catalog_is_shown_and_rebuilt(cli: Cli, tmp_path: Path, name: str) -> None:
    """Opening refuses it; verify tells where it is damaged, and the command that it names mends that."""
    cli("produce", "a/b", "--no-ship", "--store", f"file://{tmp_path}/store", "--metadata", "bucket", stdin=LINES)
    cli("topic", "ship", "a/b")
    key = f"tidelog/storage/topics/a/b/{name}"
    (tmp_path / "store" / key).write_bytes(b"junk")
    shown = cli("verify", "--cold", "--json")
    (row,) = shown.json
    assert (shown.code, row["findings"][0]["path"], row["frames"]) == (1, key, COUNT)
    assert "rebuild-catalog a/b --replace" in row["findings"][0]["fix"]
    assert cli("topic", "rebuild-catalog", "a/b", "--replace").code == 0
    assert cli("verify", "--cold").code == 0
    assert cli("consume", "a/b").out == LINES


def test_lost_metadata_comes_back_with_settings_and_cursors(cli: Cli, tmp_path: Path) -> None:
    """What the objects do not say is in the copy of the catalog; loses otherwise: every message comes again."""
    with tidelog.open("data", store=f"file://{tmp_path}/store") as log:
        topic = log.topic("a/b", retention_bytes=1 << 40)
        for number in range(4):
            topic.append(b"%d" % number)
            topic.ship()
        with topic.subscribe("billing", start="earliest") as subscription:
            for _ in range(2):
                message = subscription.receive(timeout=60)
                assert message is not None
                subscription.ack(message)
        tiered = topic._tiered
        assert tiered is not None
        tiered.owned.move_start(1)
    shutil.rmtree(tmp_path / "data")
    store = ("--store", f"file://{tmp_path}/store")
    assert cli("topic", "rebuild-catalog", "-d", "data", *store, "--json").json[0]["start_offset"] == 1
    with tidelog.open("data") as log, log.topic("a/b").subscribe("billing") as subscription:
        message = subscription.receive(timeout=60)
        assert message is not None
        assert message.value == b"2"
    assert described(cli, "a/b")["settings"] == {"retention_bytes": 1 << 40}


def divided(tmp_path: Path, metadata: str | None = None, grows: bool = False) -> dict[int, bytes]:
    """A topic with four partitions, of which two are empty; what the others have."""
    wanted = {0: b"first", 2: b"last"}
    with tidelog.open("data", store=f"file://{tmp_path}/store", metadata=metadata) as log:
        if grows:
            log.topic("a/b")
        topic = log.topic("a/b", partitions=4)
        for number, value in wanted.items():
            topic.append(value, partition=number)
            topic.partition(number).ship()
    return wanted


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("keeps", ["copy", "directory", "objects"])
def test_partitions_come_back_with_their_number(cli: Cli, tmp_path: Path, keeps: str, grows: bool) -> None:
    """Loses otherwise: keys go to other partitions than before, and readers do not find the topic at all."""
    wanted = divided(tmp_path, grows=grows)
    for path in (tmp_path / "data").glob("metadata.db*"):
        path.unlink()
    if keeps != "copy":
        shutil.rmtree(tmp_path / "store/tidelog")
    if keeps != "directory":
        shutil.rmtree(tmp_path / "data")
    rebuilt = cli("topic", "rebuild-catalog", "-d", "data", "--store", f"file://{tmp_path}/store")
    count = 3 if keeps == "objects" else 4  # of a partition that never had a message nothing is left
    assert (rebuilt.code, f"a/b has {count} partitions" in rebuilt.err) == (0, True)
    with tidelog.open("data", read_only=True) as log:
        assert log.topics() == ["a/b"]
        assert {one.partition: one.value for one in log.topic("a/b").read()} == wanted
        assert log.topic("a/b").partitions == count


def test_a_topic_with_partitions_is_rebuilt_by_its_name(cli: Cli, tmp_path: Path) -> None:
    """All its logs are, and a number that cannot be read is found again."""
    wanted = divided(tmp_path, metadata="bucket")
    (tmp_path / "store/tidelog/storage/topics/a/b/partitions").write_bytes(b"junk")
    rebuilt = cli("topic", "rebuild-catalog", "a/b", "--replace", "--json")
    assert [row["topic"] for row in rebuilt.json] == ["a/b-part-0", "a/b-part-2"]
    assert "4 partitions" in rebuilt.err, "its directory remembers"
    with tidelog.open("data", read_only=True) as log:
        assert [one.value for one in log.topic("a/b").read()] == list(wanted.values())


# Checking


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_object_is_found(cli: Cli, tmp_path: Path, damage: str) -> None:
    """Exit code 1, and the object is named; the files on this disk are good."""
    (path,) = objects_in(tmp_path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flip" else data[:-1])
    assert cli("verify").code == 0
    result = cli("verify", "--cold", "--json")
    (row,) = result.json
    (found,) = row["findings"]
    assert (result.code, path.name in found["path"], found["kind"]) == (1, True, "object")
    assert (found["first_offset"], found["last_offset"]) == (0, COUNT - 1)
    assert path.name in result.err


@pytest.mark.usefixtures("filled")
def test_another_object_in_its_place_is_found(cli: Cli, tmp_path: Path) -> None:
    """Good frames of the same size with other messages in them: only the checksum of the whole object tells."""
    (path,) = objects_in(tmp_path)
    header = path.read_bytes()[:BINDING_BYTES]
    frames, _, _ = scan(path.read_bytes()[BINDING_BYTES:], 0, 0)
    payloads = frames.payloads(0, frames.count)
    path.write_bytes(header + encode_many(0, [*payloads[:-1], payloads[-1][:-1] + b"X"]).buffer)
    result = cli("verify", "--cold")
    assert (result.code, "its checksum is crc32:" in result.err) == (1, True)


def test_a_missing_object_between_two_is_found(cli: Cli, filled: list[str], tmp_path: Path) -> None:
    """A descriptor that is gone leaves a gap in the history."""
    for line in (b"x\n", b"y\n"):
        cli("produce", "a/b", "--no-ship", stdin=line)
        cli("topic", "ship", "a/b")
    (key,) = (tmp_path / "store/tidelog").rglob(f"{COUNT:020d}")
    key.unlink()
    result = cli("verify", "--cold")
    assert (result.code, f"offset {COUNT}" in result.err) == (1, True)


def test_whole_history_verifies(cli: Cli, filled: list[str]) -> None:
    """The counts of objects, messages and bytes are shown, compressed ones included."""
    cli("topic", "create", "a/z", "--set", "ship_compression=zstd")
    cli("produce", "a/z", "--no-ship", stdin=LINES)
    cli("topic", "ship", "a/z")
    result = cli("verify", "--cold", "--json")
    assert result.code == 0
    assert [(row["target"], row["objects"], row["object_messages"]) for row in result.json] == [
        ("a/b", 1, COUNT),
        ("a/z", 1, COUNT),
    ]


# Mending


def flip(path: Path, byte: int) -> None:
    """In the frames, behind the header."""
    data = bytearray(path.read_bytes())
    data[BINDING_BYTES + byte] ^= 1
    path.write_bytes(data)


@pytest.mark.usefixtures("filled")
def test_repair_mends_from_the_store(cli: Cli, tmp_path: Path) -> None:
    """What was shipped is put back exactly; what was not is marked as lost, as without a store."""
    cli("produce", "a/b", "--no-ship", stdin=b"not shipped 1\nnot shipped 2\n")
    (wal,) = (tmp_path / "data/a/b").glob("wal.*.log")
    good = wal.read_bytes()
    flip(wal, 20)
    planned = cli("repair", "a/b")
    assert (planned.code, "from the store" in planned.out.decode()) == (1, True)
    done = cli("repair", "a/b", "--yes", "--json").json
    assert (done["restored"], done["lost"]) == ([[0, 0]], [])
    assert wal.read_bytes() == good
    flip(wal, len(good) - BINDING_BYTES - 70)
    assert cli("repair", "a/b", "--yes", "--json").json["lost"] == [[COUNT, COUNT]]
    assert cli("consume", "a/b", "--skip-gaps").out == LINES + b"not shipped 2\n"


@pytest.mark.usefixtures("filled")
def test_repair_without_the_store(cli: Cli, tmp_path: Path) -> None:
    """Asked not to, it does not look there."""
    (wal,) = (tmp_path / "data/a/b").glob("wal.*.log")
    flip(wal, 50)
    assert cli("repair", "a/b", "--local-only", "--yes", "--json").json["restored"] == []
    assert len(cli("consume", "a/b", "--skip-gaps").lines) == COUNT - 1


@pytest.mark.usefixtures("filled")
def test_a_damaged_copy_is_not_used(cli: Cli, tmp_path: Path) -> None:
    """Where the object is damaged too, the message is lost; what is in front of that in the object is put back."""
    (wal,) = (tmp_path / "data/a/b").glob("wal.*.log")
    (path,) = objects_in(tmp_path)
    flip(path, path.stat().st_size - BINDING_BYTES - 1)
    wal.write_bytes(wal.read_bytes()[:56] + bytes(100) + wal.read_bytes()[156:])
    flip(wal, wal.stat().st_size - BINDING_BYTES - 1)
    done = cli("repair", "a/b", "--yes", "--json").json
    assert (done["restored"][0][0], done["lost"]) == (0, [[COUNT - 1, COUNT - 1]])


def test_messages_of_a_later_owner_are_not_mixed_in(cli: Cli, filled: list[str], tmp_path: Path) -> None:
    """A fenced owner's damaged file is not mended with what the new owner has under the same offsets."""
    cli("produce", "a/b", "--no-ship", stdin=b"mine 1\nmine 2\n")
    cli("produce", "a/b", "--no-ship", "-d", "other", *filled, stdin=b"theirs 1\ntheirs 2\n")
    cli("topic", "ship", "a/b", "-d", "other")
    (wal,) = (tmp_path / "data/a/b").glob("wal.*.log")
    flip(wal, wal.stat().st_size - BINDING_BYTES - 60)
    done = cli("repair", "a/b", "--yes", "--json").json
    assert (done["restored"], done["lost"]) == ([], [[COUNT, COUNT]])


# The doctor


def test_the_doctor_asks_the_store(cli: Cli, filled: list[str], tmp_path: Path) -> None:
    """It is read and written, its conditional writes are proved, and nothing stays there."""
    before = sorted((tmp_path / "store").rglob("*"))
    checks = {check["check"]: check for check in cli("doctor", "--json").json}
    assert (checks["store"]["status"], checks["metadata"]["status"]) == ("ok", "ok")
    assert "conditional writes are honoured" in checks["metadata"]["detail"]
    left = set((tmp_path / "store").rglob("*")) - set(before)
    assert [path for path in left if path.is_file()] == []


def test_the_doctor_finds_the_catalog_of_another_store(cli: Cli, tmp_path: Path) -> None:
    """With the fix: a root of its own."""
    shared = ("--metadata", f"sqlite://{tmp_path / 'shared.db'}")
    with tidelog.open(tmp_path / "mine", store=f"file://{tmp_path / 'one'}", metadata=shared[1]):
        pass
    checks = {
        check["check"]: check
        for check in cli("doctor", "--json", "--store", f"file://{tmp_path / 'two'}", *shared).json
    }
    assert checks["metadata"]["status"] == "fail"
    assert "TIDELOG_METADATA_ROOT" in checks["metadata"]["fix"]


def test_the_doctor_fails_where_no_store_answers(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is not there is a failed check with a fix, among the others."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("TIDELOG_STORE_MAX_RETRIES", "0")
    result = cli("doctor", "--store", "s3://bucket/prefix", "--metadata", "bucket", "--json")
    checks = {check["check"]: check for check in result.json}
    assert (result.code, checks["store"]["status"], checks["python"]["status"]) == (1, "fail", "ok")
    assert checks["store"]["fix"]


# A real server


def test_all_of_it_against_a_real_server(
    cli: Cli, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Shipped, sealed, taken over, fenced, rescued, swept, verified, lost and rebuilt, with SeaweedFS."""
    settings = s3_server.settings()
    assert settings.store_secret_access_key is not None
    monkeypatch.setenv("AWS_ENDPOINT_URL", str(settings.store_endpoint))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", str(settings.store_access_key_id))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", settings.store_secret_access_key.reveal())
    store = ["--store", s3_server.url(f"cli-{tmp_path.name}"), "--metadata", "bucket"]
    assert cli("doctor", *store, "--json").code == 0
    cli("produce", "a/b", "--no-ship", *store, stdin=LINES)
    assert cli("topic", "ship", "--all", "--json").json[0]["shipped_offset"] == COUNT
    cli("produce", "a/b", "--no-ship", stdin=b"tail\n")
    cli("produce", "a/b", "--no-ship", "-d", "other", *store, stdin=b"there\n")
    assert cli("topic", "rescue", "a/b", "--json").json[0]["messages"] == 1
    assert cli("topic", "rescue", "a/b", "--into", "a/saved").code == 0
    assert cli("consume", "a/saved").out == b"tail\n"
    assert cli("topic", "seal", "a/b", "-d", "other").code == 0
    assert cli("topic", "sweep", "--all", "--apply").code == 0
    assert cli("verify", "--cold", "-d", "nowhere", *store).code == 0
    shutil.rmtree(tmp_path / "data")
    assert cli("topic", "rebuild-catalog", "a/b", "--replace", "-d", "new", *store).code == 0
    assert cli("consume", "a/b", "-d", "new").out == LINES + b"there\n"
    assert cli("topic", "delete", "a/b", "-d", "new", "--yes", "--json").json["objects"] == 2


def test_damage_in_an_object_is_read_around(cli: Cli, filled: list[str], tmp_path: Path) -> None:
    """Consume names object and way around; --skip-gaps leaves out exactly the damaged message and says which."""
    shutil.rmtree(tmp_path / "data")
    (path,) = objects_in(tmp_path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    read = cli("consume", "a/b", *filled)
    assert (read.code, len(read.lines)) == (5, COUNT - 1)
    assert path.name in read.err
    skipped = cli("consume", "a/b", "--skip-gaps", *filled)
    assert (skipped.code, len(skipped.lines)) == (0, COUNT - 1)
    assert f"offset {COUNT - 1} damaged" in skipped.err


# A catalog outside of the bucket


def test_published_catalog_is_read_and_never_written(cli: Cli, tmp_path: Path) -> None:
    """The bucket alone is enough to look, and what would write or delete by the copy says where the metadata is."""
    url = f"file://{tmp_path}/store"
    cli("produce", "a/b", "--store", url, stdin=LINES)
    bucket = ["--dir", "elsewhere", "--store", url, "--metadata", "bucket"]
    assert cli("consume", "a/b", *bucket).out == LINES
    assert cli("verify", "a/b", *bucket).code == 0
    (row,) = cli("topic", "list", "--json", *bucket).json
    assert (row["topic"], row["shipped_offset"]) == ("a/b", COUNT)
    truth = f"the metadata store is sqlite://{tmp_path}/data/metadata.db"
    for command in (
        ("produce", "a/b"),
        ("topic", "delete", "a/b", "--yes"),
        ("topic", "seal", "a/b"),
        ("topic", "rebuild-catalog", "a/b", "--replace"),
        ("topic", "remove-orphans", "a/b"),
        ("topic", "remove-orphans", "a/b", "--apply"),
    ):
        refused = cli(*command, *bucket, stdin=b"more\n")
        assert refused.code == 2, (command, refused.err)
        assert truth in " ".join(refused.err.split()), command
    assert cli("consume", "a/b").out == LINES


def test_rebuilt_catalog_is_published(cli: Cli, tmp_path: Path) -> None:
    """Whoever lost the metadata rebuilds it where it was, and the copy follows."""
    url = f"file://{tmp_path}/store"
    cli("produce", "a/b", "--store", url, stdin=LINES)
    for path in (tmp_path / "data").glob("metadata.db*"):
        path.unlink()
    assert cli("topic", "rebuild-catalog").code == 0
    assert cli("produce", "a/b", stdin=b"next\n").code == 0
    assert cli("consume", "a/b", "--dir", "elsewhere", "--store", url, "--metadata", "bucket").out == LINES + b"next\n"
