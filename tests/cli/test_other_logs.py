"""Files and objects of another log, put in the place of a log's own: refused by name, never read as data."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Cli

import tidelog
from tidelog.errors import CorruptionError, DataError, OtherLogError, TidelogError
from tidelog.log.binding import BINDING_BYTES, BoundFiles, decode_binding, encode_binding, known_log_id
from tidelog.log.frame import encode
from tidelog.log.repair import plan_repair
from tidelog.topics.directory import LogDirectory

COUNT = 6


def fill(root: Path, name: str, word: bytes, **settings: Any) -> None:
    """A topic with messages of the same size at the same offsets as every other."""
    with tidelog.open(root, **settings) as log:
        log.topic(name).append_many([b"%s %d" % (word, number) for number in range(COUNT)])


def wal_of(root: Path, name: str) -> Path:
    (path,) = (root / name).glob("wal.*.log")
    return path


def id_of(root: Path, name: str) -> str:
    found = known_log_id(BoundFiles(), root / name)
    assert found is not None
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two topics with the same offsets."""
    fill(tmp_path / "data", "a/one", b"one")
    fill(tmp_path / "data", "a/two", b"two")
    return tmp_path / "data"


# WAL files


def test_every_topic_has_an_id_of_its_own(root: Path) -> None:
    """It is in the header of its files, and stays over openings."""
    ids = {name: id_of(root, name) for name in ("a/one", "a/two")}
    assert len(set(ids.values())) == 2
    for name, found in ids.items():
        assert decode_binding(wal_of(root, name).read_bytes()).log_id == found
    with tidelog.open(root) as log:
        log.topic("a/one").append(b"more")
    assert id_of(root, "a/one") == ids["a/one"]


def test_a_file_of_another_topic_with_the_same_offsets_is_refused(root: Path) -> None:
    """By its owner and by an onlooker, with both ids and the file in the error."""
    shutil.copy(wal_of(root, "a/two"), wal_of(root, "a/one"))
    for read_only in (False, True):
        with tidelog.open(root, read_only=read_only) as log, pytest.raises(OtherLogError) as raised:
            log.topic("a/one")
        error = raised.value
        assert (error.expected, error.found) == (id_of(root, "a/one"), id_of(root, "a/two"))
        assert "wal.0000000000.log" in str(error)
        assert error.hint


def test_a_file_that_is_swapped_under_an_open_topic_is_refused(root: Path) -> None:
    """A reader that opens it anew does not take it for the topic's own."""
    with tidelog.open(root, read_only=True) as log:
        topic = log.topic("a/one")
        shutil.copy(wal_of(root, "a/two"), wal_of(root, "a/one"))
        with pytest.raises(OtherLogError):
            list(topic.read())


def test_without_the_id_file_the_files_say_it(root: Path) -> None:
    """A log.id that is lost is written again; files that disagree are refused by name."""
    expected = id_of(root, "a/one")
    (root / "a/one/log.id").unlink()
    with tidelog.open(root) as log:
        assert len(list(log.topic("a/one").read())) == COUNT
    assert id_of(root, "a/one") == expected
    (root / "a/one/log.id").unlink()
    shutil.copy(wal_of(root, "a/two"), root / "a/one/wal.0000000001.log")
    with tidelog.open(root) as log, pytest.raises(DataError, match="files of several logs"):
        log.topic("a/one")


def test_verify_names_a_foreign_file_and_repair_puts_it_aside(root: Path, cli: Cli) -> None:
    """Nothing of it comes into the log, and what it replaced is marked as lost."""
    shutil.copy(wal_of(root, "a/two"), wal_of(root, "a/one"))
    checked = cli("verify", "a/one")
    assert checked.code != 0
    assert "another log" in checked.out.decode() + checked.err
    plan = plan_repair(root / "a/one")
    (kept,) = plan.apply()
    assert kept.read_bytes() == wal_of(root, "a/two").read_bytes()
    with tidelog.open(root) as log:
        assert list(log.topic("a/one").read(on_gap="skip")) == []
        assert log.topic("a/one").next_offset == COUNT


def test_a_topic_that_is_made_again_is_another_log(root: Path) -> None:
    """A copy of a file of its first life is refused in its second."""
    old, copy = id_of(root, "a/one"), wal_of(root, "a/one").read_bytes()
    with tidelog.open(root) as log:
        log.delete_topic("a/one")
        log.topic("a/one").append_many([b"%s %d" % (b"new", number) for number in range(COUNT)])
    assert id_of(root, "a/one") != old
    wal_of(root, "a/one").write_bytes(copy)
    with tidelog.open(root) as log, pytest.raises(OtherLogError):
        log.topic("a/one")


def test_the_command_line_shows_the_id(root: Path, cli: Cli) -> None:
    """So that an error can be held against it."""
    assert cli("topic", "describe", "a/one", "--json").json["id"] == id_of(root, "a/one")
    assert cli("inspect", "a/one", "--json").json["log_id"] == id_of(root, "a/one")


# Headers that are damaged


@pytest.mark.parametrize("bit", range(8 * BINDING_BYTES))
def test_no_bit_of_a_header_may_flip(bit: int) -> None:
    """A header with any bit flipped is no header."""
    data = bytearray(encode_binding("0f1e2d3c4b5a69788796a5b4c3d2e1f0", 42))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DataError):
        decode_binding(bytes(data))


@pytest.mark.parametrize("byte", [0, 4, 8, 23, 24, 31, 32, 35])
def test_a_damaged_header_is_refused_and_mended(root: Path, byte: int) -> None:
    """Opening refuses it, verify names it, a repair writes it again and loses nothing."""
    path = wal_of(root, "a/one")
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)
    with tidelog.open(root) as log, pytest.raises(CorruptionError, match=r"header.* at byte 0 of .*wal\.0000000000"):
        log.topic("a/one")
    plan = plan_repair(root / "a/one")
    assert (plan.is_needed, plan.lost) == (True, ())
    plan.apply()
    with tidelog.open(root) as log:
        assert [message.value for message in log.topic("a/one").read()] == [b"one %d" % n for n in range(COUNT)]


@pytest.mark.parametrize("size", [0, 1, 4, 8, 24, 35, 36, 37, 51])
def test_a_header_that_a_crash_cut_short_is_no_damage(tmp_path: Path, size: int) -> None:
    """The newest file of a crash: cut anywhere in its header, or behind it in the first frame."""
    with tidelog.open(tmp_path) as log:
        log.topic("a/b").append(b"first")
    path = wal_of(tmp_path, "a/b")
    (tmp_path / "a/b/wal.ckpt").unlink()
    path.write_bytes(path.read_bytes()[:size])
    with tidelog.open(tmp_path) as log:
        topic = log.topic("a/b")
        assert (topic.next_offset, list(topic.read())) == (0, [])
        topic.append(b"again", sync=True)
    with tidelog.open(tmp_path) as log:
        assert [message.value for message in log.topic("a/b").read()] == [b"again"]


def test_a_file_without_a_header_is_refused(root: Path) -> None:
    """Frames alone are not a file of any log."""
    path = wal_of(root, "a/one")
    path.write_bytes(path.read_bytes()[BINDING_BYTES:])
    with tidelog.open(root) as log, pytest.raises(CorruptionError, match="not the header of a log"):
        log.topic("a/one")


def test_a_frame_copied_to_another_offset_is_damage(root: Path) -> None:
    """The same message with the number of its neighbour in its header is not that neighbour."""
    path = wal_of(root, "a/one")
    data = bytearray(path.read_bytes())
    size = (len(data) - BINDING_BYTES) // COUNT
    first, second = BINDING_BYTES + size, BINDING_BYTES + 2 * size
    data[second + 8 : second + size] = data[first + 8 : first + size]
    path.write_bytes(data)
    with tidelog.open(root) as log, pytest.raises(CorruptionError, match="checksum"):
        log.topic("a/one")


# Objects


def shipped(tmp_path: Path, codec: str) -> Path:
    """Two topics with one object each, of the same name and the same size, and no files any more."""
    data = tmp_path / "data"
    settings: dict[str, Any] = {
        "store": (tmp_path / "store").as_uri(),
        "metadata": "bucket",
        "ship_compression": codec,
    }
    with tidelog.open(data, **settings) as log:
        for name, word in (("a/one", b"one"), ("a/two", b"two")):
            log.topic(name).append_many([b"%s %d" % (word, number) for number in range(COUNT)])
            log.topic(name).ship()
            log.topic(name).seal()
    return data


def object_of(tmp_path: Path, name: str) -> Path:
    (path,) = (tmp_path / "store/storage/topics" / name / "objects").glob("data-*.tlog")
    return path


def test_objects_of_two_topics_that_are_swapped_are_refused(tmp_path: Path, cli: Cli) -> None:
    """Of the same name and the same size: from the beginning, from the middle, and by verify."""
    data = shipped(tmp_path, "none")
    one, two = object_of(tmp_path, "a/one"), object_of(tmp_path, "a/two")
    assert (one.name, one.stat().st_size) == (two.name, two.stat().st_size)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    check_refused(data, cli)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_an_object_with_the_header_of_another_log_is_refused(tmp_path: Path, codec: str, cli: Cli) -> None:
    """Plain and compressed, whatever is behind the header."""
    data = shipped(tmp_path, codec)
    path = object_of(tmp_path, "a/one")
    other = decode_binding(object_of(tmp_path, "a/two").read_bytes()).log_id
    path.write_bytes(encode_binding(other, 0) + path.read_bytes()[BINDING_BYTES:])
    check_refused(data, cli)


def check_refused(data: Path, cli: Cli) -> None:
    with tidelog.open(data, read_only=True) as log:
        for start in (0, COUNT // 2):
            with pytest.raises(OtherLogError, match="a/one/objects/data-0-5"):
                list(log.topic("a/one").read(start))
    checked = cli("verify", "--cold", "a/one")
    assert checked.code != 0
    assert "another log" in checked.out.decode() + checked.err


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_rebuild_learns_the_id_and_refuses_objects_that_disagree(tmp_path: Path, codec: str) -> None:
    """Without a catalog the objects say which log it is; one of another log is refused by name."""
    data = shipped(tmp_path, codec)
    with tidelog.open(data) as log:
        log.topic("a/one").append_many([b"more %d" % number for number in range(COUNT)])
        log.topic("a/one").ship()
        log_id = owner_id(log, "a/one")
    first, _ = sorted((tmp_path / "store/storage/topics/a/one/objects").glob("data-*.tlog"))
    rebuilt(data, "a/one")
    with tidelog.open(data, read_only=True) as log:
        assert owner_id(log, "a/one") == log_id
        assert len(list(log.topic("a/one").read())) == 2 * COUNT
    first.write_bytes(object_of(tmp_path, "a/two").read_bytes())
    with pytest.raises(TidelogError, match=f"another log.*{log_id}"):
        rebuilt(data, "a/one")


def owner_id(log: LogDirectory, name: str) -> str:
    assert log._tier is not None
    found = log._tier.catalog(*name.split("/")).owner()
    assert found is not None
    return found[0].log_id


def rebuilt(data: Path, name: str) -> None:
    """The catalog made anew from nothing but the objects."""
    from tidelog.clock import SystemClock
    from tidelog.cold.rebuild import rebuild_catalog

    with tidelog.open(data) as log:
        tier = log._tier
        assert tier is not None
        catalog = tier.catalog(*name.split("/"))
        for key in catalog.metadata.keys(catalog.keys.metadata_prefix):
            catalog.metadata.delete(key)
        rebuild_catalog(catalog.metadata, catalog.keys, tier.objects, clock=SystemClock())


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_compacted_object_belongs_to_the_log(tmp_path: Path, codec: str) -> None:
    """And the id stays with a topic that another node takes over from the store."""
    data = shipped(tmp_path, codec)
    with tidelog.open(data, read_only=True) as log:
        log_id = owner_id(log, "a/one")
    other = tmp_path / "other"
    with tidelog.open(other, store=(tmp_path / "store").as_uri(), metadata="bucket") as log:
        log.topic("a/one").append(b"from elsewhere")
        log.topic("a/one").ship()
        assert owner_id(log, "a/one") == log_id
    assert id_of(other, "a/one") == log_id
    for path in (tmp_path / "store/storage/topics/a/one/objects").glob("data-*.tlog"):
        assert decode_binding(path.read_bytes()).log_id == log_id


def test_files_of_another_log_beside_a_catalog_are_refused(tmp_path: Path) -> None:
    """A whole directory of another topic, its id file included, in the place of a topic that the store knows."""
    store: dict[str, Any] = {"store": (tmp_path / "store").as_uri(), "metadata": "bucket"}
    fill(tmp_path / "data", "a/one", b"one", **store)
    fill(tmp_path / "data", "a/two", b"two", **store)
    for name in ("log.id", "wal.0000000000.log", "wal.ckpt"):
        shutil.copy(tmp_path / "data/a/two" / name, tmp_path / "data/a/one" / name)
    with tidelog.open(tmp_path / "data") as log, pytest.raises(OtherLogError):
        log.topic("a/one")


def test_frames_are_behind_the_header(root: Path) -> None:
    """The first frame begins right behind it."""
    data = wal_of(root, "a/one").read_bytes()
    binding = decode_binding(data)
    assert binding.first_offset == 0
    assert data[BINDING_BYTES : BINDING_BYTES + 8] == encode(0, b"x")[:8]
