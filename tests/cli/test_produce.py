"""`tidelog produce`: what goes in, and what is said about it."""

from __future__ import annotations

import io
import json
import signal
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.cli.conftest import Cli, Spawn

import tidelog
from tidelog.cli.produce import split_records


def read_all(root: str | Path, topic: str) -> list[tidelog.Message]:
    with tidelog.open(root, read_only=True) as log:
        return list(log.topic(topic).read())


def test_lines_become_messages(cli: Cli) -> None:
    """A line is a message, and a note says how many there were and which offsets they got."""
    result = cli("produce", "a/b", stdin=b"one\ntwo\nthree\n")
    assert (result.code, result.out) == (0, b"")
    assert result.err == "produced 3 messages to a/b: offsets 0 to 2\n"
    assert cli("produce", "a/c", stdin=b"one\n").err == "produced 1 message to a/c: offset 0\n"
    assert [m.value for m in read_all("data", "a/b")] == [b"one", b"two", b"three"]


def test_a_second_run_goes_on(cli: Cli) -> None:
    """Offsets go on where the last run ended."""
    cli("produce", "a/b", stdin=b"one\n")
    assert cli("produce", "a/b", "--json", stdin=b"two\n").json == {
        "topic": "a/b",
        "partition": 0,
        "messages": 1,
        "first_offset": 1,
        "last_offset": 1,
    }


def test_bytes_come_back_as_they_went_in(cli: Cli) -> None:
    """Binary content, empty lines and a last line without an end survive the way in and out."""
    data = bytes(range(11, 256)) + b"\r\n\n\n\x00\xff\xfe\nlast"
    cli("produce", "a/b", stdin=data)
    result = cli("consume", "a/b")
    assert result.out == data + b"\n"


def test_nul_separated_records(cli: Cli) -> None:
    """With --null a message may hold line ends, both ways."""
    data = b"two\nlines\x00\x00other\x00"
    cli("produce", "a/b", "--null", stdin=data)
    assert [m.value for m in read_all("data", "a/b")] == [b"two\nlines", b"", b"other"]
    assert cli("consume", "a/b", "-0").out == data


def test_nothing_in_nothing_stored(cli: Cli) -> None:
    """Empty input is no message, not an empty one."""
    result = cli("produce", "a/b")
    assert result.code == 0
    assert "no messages" in result.err
    assert read_all("data", "a/b") == []


def test_a_file_instead_of_stdin(cli: Cli, tmp_path: Path) -> None:
    """Messages come from a file when one is named."""
    (tmp_path / "lines").write_bytes(b"".join(b"%d\n" % n for n in range(20_000)))
    assert cli("produce", "a/b", "lines", stdin=b"not me\n").code == 0
    assert [m.value for m in read_all("data", "a/b")] == [b"%d" % n for n in range(20_000)]


def test_keys_and_headers(cli: Cli) -> None:
    """A key stands before the separator, headers are the same for every message."""
    cli("produce", "a/b", "--key-separator", "::", "-H", "source=till", "-H", "note=a=b", stdin=b"k1::v::1\n::v2\n")
    first, second = read_all("data", "a/b")
    assert (first.key, first.value, first.headers) == (b"k1", b"v::1", {"source": b"till", "note": b"a=b"})
    assert (second.key, second.value) == (b"", b"v2")


def test_a_line_without_a_key(cli: Cli) -> None:
    """A line without the separator ends the command and is named; those before it are stored."""
    result = cli("produce", "a/b", "--key-separator", ":", stdin=b"a:1\nb:2\nnot keyed\nc:3\n")
    assert result.code == 2
    assert "produced 2 messages" in result.err
    assert "error: record 3: there is no key separator ':'" in result.err
    assert [m.value for m in read_all("data", "a/b")] == [b"1", b"2"]


def test_a_first_line_without_a_key(cli: Cli) -> None:
    """Where nothing came before the culprit, nothing is said about it."""
    result = cli("produce", "a/b", "--key-separator", ":", stdin=b"not keyed\n")
    assert (result.code, result.err) == (2, "error: record 1: there is no key separator ':'\n")


@pytest.mark.parametrize("header", ["nonsense", "=value"])
def test_a_header_that_is_none(cli: Cli, header: str) -> None:
    """A header that is not NAME=VALUE is refused before anything is stored."""
    result = cli("produce", "a/b", "-H", header, stdin=b"x\n")
    assert result.code == 2
    assert "is not NAME=VALUE" in result.err
    assert not Path("data").exists()


def test_a_line_that_is_too_long(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record over the limit is refused without being gathered in memory first."""
    monkeypatch.setenv("TIDELOG_MAX_MESSAGE_BYTES", "1KiB")
    result = cli("produce", "a/b", stdin=b"short\n" + bytes(5000))
    assert result.code == 2
    assert "longer than max_message_bytes (1024)" in result.err


def test_a_message_that_is_too_large(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message over the limit among others is named; those before it are stored."""
    monkeypatch.setenv("TIDELOG_MAX_MESSAGE_BYTES", "1KiB")
    result = cli("produce", "a/b", stdin=b"a\nb\n" + b"c" * 1020 + b"\nd\n")
    assert result.code == 2
    assert "error: record 3: a message of 1044 bytes is over max_message_bytes" in result.err
    assert [m.value for m in read_all("data", "a/b")] == [b"a", b"b"]


@pytest.mark.parametrize(("arguments", "code"), [(("a/b", "missing.txt"), 3), (("nonsense",), 2)])
def test_input_that_cannot_be_used(cli: Cli, arguments: tuple[str, ...], code: int) -> None:
    """A missing file or a bad name is told before a log directory is made."""
    result = cli("produce", *arguments)
    assert result.code == code
    assert result.err.startswith("error: ")
    assert arguments[-1] in result.err
    assert not Path("data").exists()


def test_a_typed_line_is_stored_at_once(spawn: Spawn, tmp_path: Path) -> None:
    """A line that arrives alone does not wait for others: a second process reads it while the first still runs."""
    producer = spawn("produce", "a/b", "--sync", "-d", "data")
    consumer = None
    assert producer.stdin is not None
    for number in range(3):
        producer.stdin.write(b"line %d\n" % number)
        producer.stdin.flush()
        if consumer is None:
            wait_for_topic(tmp_path / "data" / "a" / "b")
            consumer = spawn("consume", "a/b", "--follow", "-d", "data")
        assert consumer.stdout is not None
        assert consumer.stdout.readline() == b"line %d\n" % number
    producer.stdin.close()
    assert producer.wait(120) == 0


def test_ctrl_c_says_what_is_on_the_disk(spawn: Spawn, tmp_path: Path) -> None:
    """What had been read is synced, counted and told."""
    producer = spawn("produce", "a/b", "-d", "data")
    assert producer.stdin is not None
    producer.stdin.write(b"x\n" * 1000)
    producer.stdin.flush()
    wait_for_topic(tmp_path / "data" / "a" / "b")
    producer.send_signal(signal.SIGINT)
    _, err = producer.communicate(timeout=120)
    assert producer.returncode == 130
    messages = read_all(tmp_path / "data", "a/b")
    assert err.decode() == f"produced {len(messages)} messages to a/b: offsets 0 to {len(messages) - 1} (interrupted)\n"


def wait_for_topic(directory: Path) -> None:
    """The producer has stored its first line."""
    limit = time.monotonic() + 120
    while not any(path.stat().st_size for path in directory.glob("wal.*.log")):
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_records_are_split_alike_however_they_arrive() -> None:
    """Where the reads cut the input makes no difference."""
    data = b"a\n\nbc\n" + b"d" * 3000 + b"\nend"

    class Slow(io.BytesIO):
        def read1(self, size: int | None = -1, /) -> bytes:
            return super().read1(7)

    for stream in (io.BytesIO(data), Slow(data)):
        records = [record for batch in split_records(stream, b"\n", 5000, lambda done: None) for record in batch]
        assert records == [b"a", b"", b"bc", b"d" * 3000, b"end"]


def test_a_time_of_delivery_survives_json(cli: Cli) -> None:
    """What `consume --json` shows is what `produce --from-json` stores."""
    line = b'{"value": "later", "deliver_at": "2030-01-02T03:04:05.000006Z"}\n{"value": "now"}\n'
    assert cli("produce", "a/b", "--from-json", stdin=line).code == 0
    shown = cli("consume", "a/b", "--json").out
    assert b'"deliver_at":"2030-01-02T03:04:05.000006Z"' in shown
    assert cli("produce", "a/c", "--from-json", stdin=shown).code == 0
    first, second = read_all("data", "a/c")
    assert (first.deliver_at, second.deliver_at) == (datetime(2030, 1, 2, 3, 4, 5, 6, tzinfo=UTC), None)


def test_nulls_and_repeated_headers_survive_json(cli: Cli, tmp_path: Path) -> None:
    """What consume --json writes, produce --from-json appends: null is null, and empty is empty."""
    pairs = [("h", b"1"), ("h", None), ("b", b"\xff"), ("h", b"")]
    with tidelog.open(tmp_path / "data") as log:
        topic = log.topic("a/b")
        topic.append(None, key=b"k")
        topic.append(b"", key=None, headers={"n": None, "e": b"", "b": b"\xff"})
        topic.append(None, headers=pairs)
    lines = cli("--json", "consume", "a/b").out
    written = [json.loads(line) for line in lines.splitlines()]
    assert [one["value"] for one in written] == [None, "", None]
    assert written[1]["headers"] == {"n": None, "e": "", "b": "/w=="}
    assert "header_list" not in written[1]
    assert written[2]["header_list"] == [["h", "1"], ["h", None], ["b", "/w==", "base64"], ["h", ""]]
    assert cli("produce", "a/c", "--from-json", stdin=lines).code == 0
    with tidelog.open(tmp_path / "data", read_only=True) as log:
        found = [[(one.value, one.key, one.header_list) for one in log.topic(name).read()] for name in ("a/b", "a/c")]
    assert found[0] == found[1]
    assert found[0][2] == (None, None, tuple(pairs))
    assert cli("consume", "a/b", "--format", r"%v|%s|%h\n").out.splitlines()[2] == b"|0|h=1,h,b=\xff,h="
    assert cli("consume", "a/b").out == b"\n\n\n"
    assert cli("produce", "a/d", "--from-json", stdin=b'{"key": "k"}\n').code == 2
