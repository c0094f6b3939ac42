"""Links, FIFOs and other things in the place of our files: nothing outside of the directory is touched, nobody waits.

A log directory may be written to by others, by mistake or on purpose. What a name in it points at is not ours.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

import tidelog
from tidelog import InputError, TidelogError
from tidelog.cli.demo import command as demo
from tidelog.cli.dev_s3 import SeaweedDirectory
from tidelog.files import LocalFiles
from tidelog.store.metadata.sqlite import SqliteMetadataStore

NAME = "shop/orders"
KEPT = b"not ours, and longer than what would be written over it" * 100


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A file of somebody else."""
    path = tmp_path / "precious"
    path.write_bytes(KEPT)
    return path


def fill(root: Path) -> None:
    with tidelog.open(root) as log:
        log.topic(NAME).append(b"value", sync=True)
        log.topic(NAME).subscribe("billing", start="earliest")


def link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def fifo(path: Path, _: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def use(root: Path) -> None:
    """What a user does with a topic."""
    with tidelog.open(root) as log:
        topic = log.topic(NAME)
        topic.append(b"more", sync=True)
        topic.subscribe("billing", start="earliest")


KINDS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "link": (link, "is a symbolic link, which is not followed"),
    "fifo": (fifo, "is a FIFO, not a file"),
}
NAMES = [".lock", "tidelog.json", "metadata.db", f"{NAME}/wal.0000000000.log", f"{NAME}/topic.json"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_a_log_that_is_something_else_is_refused_by_name(
    tmp_path: Path, target: Path, name: str, kind: str
) -> None:
    """Opening says which name it is, at once, and what is behind it stays as it was."""
    root = tmp_path / "data"
    fill(root)
    make, words = KINDS[kind]
    make(root / name, target)
    with pytest.raises(InputError, match=f"{Path(name).name} {words}.*Put the file itself there"):
        use(root)
    assert target.read_bytes() == KEPT
    (root / name).unlink()
    if name.endswith(("lock", "topic.json")):
        use(root)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hint_that_is_something_else_is_replaced(tmp_path: Path, target: Path, kind: str) -> None:
    """The checkpoint is not believed, and the next one takes the name without touching what it led to."""
    root = tmp_path / "data"
    fill(root)
    KINDS[kind][0](root / NAME / "wal.ckpt", target)
    use(root)
    assert target.read_bytes() == KEPT
    assert not (root / NAME / "wal.ckpt").is_symlink()
    assert (root / NAME / "wal.ckpt").is_file()


@pytest.mark.parametrize("leads_somewhere", [True, False])
def test_a_link_in_the_place_of_a_file_that_is_being_written(
    tmp_path: Path, target: Path, leads_somewhere: bool
) -> None:
    """What is written beside its name is a new file, whatever lay there."""
    temporary = tmp_path / "document.tmp"
    temporary.symlink_to(target if leads_somewhere else tmp_path / "nowhere")
    LocalFiles().write_atomically(tmp_path / "document", b"content")
    assert (tmp_path / "document").read_bytes() == b"content"
    assert target.read_bytes() == KEPT
    assert not (tmp_path / "nowhere").exists()


def test_another_directory_is_not_emptied_in_the_place_of_deleted_topics(tmp_path: Path, target: Path) -> None:
    """Lost: a directory that `.deleted` led to, at the next opening."""
    root, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    fill(root)
    elsewhere.mkdir()
    target.rename(elsewhere / "precious")
    (root / ".deleted").symlink_to(elsewhere)
    with pytest.raises(InputError, match=r"\.deleted is a symbolic link"):
        use(root)
    assert (elsewhere / "precious").read_bytes() == KEPT
    with pytest.raises(OSError, match="is a symbolic link"):
        LocalFiles().remove_tree(root / ".deleted")
    (root / ".deleted").unlink()
    use(root)


def test_fenced_files_are_not_looked_for_elsewhere(tmp_path: Path) -> None:
    """Lost: what lay in the directory that `fenced` led to, when a tail was discarded."""
    root, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    elsewhere.mkdir()
    store = (tmp_path / "store").as_uri()
    with tidelog.open(root, store=store) as log:
        log.topic(NAME).append(b"value", sync=True)
    (root / NAME / "fenced").symlink_to(elsewhere)
    with pytest.raises(InputError, match="fenced is a symbolic link"), tidelog.open(root) as log:
        log.topic(NAME)


def test_a_directory_that_is_reached_through_a_link_is_opened(tmp_path: Path) -> None:
    """The log directory itself, a namespace and a topic may lie elsewhere."""
    places = {
        tmp_path / "log": tmp_path / "a",
        tmp_path / "a/shop": tmp_path / "b",
        tmp_path / "b/orders": tmp_path / "c",
    }
    for path, place in places.items():
        place.mkdir()
        path.symlink_to(place)
    fill(tmp_path / "log")
    use(tmp_path / "log")
    assert (tmp_path / "c/wal.0000000000.log").is_file()
    with tidelog.open(tmp_path / "log", read_only=True) as log:
        assert len(list(log.topic(NAME).read())) == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [".lock", "tidelog.json", f"{NAME}/wal.0000000000.log"])
def test_whoever_only_reads_does_not_wait_for_a_fifo(tmp_path: Path, target: Path, name: str, kind: str) -> None:
    """A reader refuses the same files, but for the lock, which it does not need."""
    root = tmp_path / "data"
    fill(root)
    KINDS[kind][0](root / name, target)
    if name == ".lock":
        with tidelog.open(root, read_only=True) as log:
            assert len(list(log.topic(NAME).read())) == 1
        return
    with pytest.raises(InputError, match=KINDS[kind][1]), tidelog.open(root, read_only=True) as log:
        list(log.topic(NAME).read())


def fill_engine(root: Path) -> None:
    with tidelog.open_engine(root) as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        engine.apply(2, tidelog.PutObject("b", "k", b"v"))
        engine.create_checkpoint()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["engine.json", "pages.db", "wal/lock", "wal/wal.0000000000.log"])
def test_a_file_of_an_engine_that_is_something_else_is_refused(
    tmp_path: Path, target: Path, name: str, kind: str
) -> None:
    """As for a log: by name, at once, and nothing is written elsewhere."""
    root = tmp_path / "engine"
    fill_engine(root)
    KINDS[kind][0](root / name, target)
    with pytest.raises(TidelogError, match=f"{Path(name).name} {KINDS[kind][1]}"):
        fill_engine(root)
    assert target.read_bytes() == KEPT


def test_every_other_kind_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket, a device and a directory are no files either."""
    files = LocalFiles()
    with socket.socket(socket.AF_UNIX) as one:
        monkeypatch.chdir(tmp_path)  # the path of a socket may be only so long
        one.bind("socket")
        with pytest.raises(OSError, match="socket is a socket, not a file"):
            files.open(tmp_path / "socket")
    with pytest.raises(OSError, match="null is a device, not a file"):
        files.open(Path("/dev/null"), write=True)
    with pytest.raises(IsADirectoryError):
        files.open(tmp_path)


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_catalog_in_sqlite_is_a_file(tmp_path: Path, target: Path, kind: str, suffix: str) -> None:
    """The file itself and those that SQLite makes beside it."""
    KINDS[kind][0](tmp_path / f"catalog.db{suffix}", target)
    with pytest.raises(InputError, match=KINDS[kind][1]):
        SqliteMetadataStore(tmp_path / "catalog.db")
    assert target.read_bytes() == KEPT


@pytest.mark.parametrize("name", ["made-by-tidelog-demo", "live"])
def test_the_demo_removes_nothing_elsewhere(tmp_path: Path, target: Path, name: str) -> None:
    """A link among what an earlier demo made is refused."""
    directory = tmp_path / "demo"
    demo.prepare(directory)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link(directory / name, target if name.startswith("made") else elsewhere)
    with pytest.raises(InputError, match="is a symbolic link"):
        demo.prepare(directory)
    assert elsewhere.is_dir()
    assert target.read_bytes() == KEPT


def test_a_server_for_development_keeps_to_its_directory(tmp_path: Path, target: Path) -> None:
    """Its lock, its log, its keys and its data are its own."""
    directory = SeaweedDirectory(tmp_path / "s3")
    uses: dict[str, Callable[[], object]] = {
        "lock": directory.take,
        "seaweedfs.log": directory.open_log,
        "s3.json": directory.keys,
    }
    for name, use_it in uses.items():
        link(tmp_path / "s3" / name, target)
        with pytest.raises(InputError, match=f"{name} is a symbolic link"):
            use_it()
    (tmp_path / "s3/data").rmdir()
    (tmp_path / "s3/data").symlink_to(tmp_path)
    with pytest.raises(InputError, match="data is a symbolic link"):
        SeaweedDirectory(tmp_path / "s3")
    assert target.read_bytes() == KEPT
