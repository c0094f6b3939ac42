"""What shipping and reading history, and large values of engines, take of the memory does not grow with them."""

from __future__ import annotations

from pathlib import Path

from tests.log.workbench import run_python
from tests.servers import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server

MIB = 1 << 20
# Parts on their way, the ranges read ahead, and what an allocator keeps for itself.
MOST_GROWTH_BYTES = 96 * MIB

# Ships 160 MiB as one object and reads it from the store alone; tells by how much its memory grew at most.
PROGRAM = """
import sys, tidelog
directory, url, endpoint, key_id, secret = sys.argv[1:]
place = {"store": url, "metadata": "bucket", "store_endpoint": endpoint, "store_access_key_id": key_id,
    "store_secret_access_key": secret}

def memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

with tidelog.open(directory, ship_interval_seconds=3600, cache_max_bytes=1 << 20, **place) as log:
    topic, batch = log.topic("shop/orders"), [bytes(10_000)] * 100
    for _ in range(160):
        topic.append_many(batch, sync=True)
    before = memory("VmRSS")
    topic.ship()
with tidelog.open(directory + "-reader", read_only=True, **place) as log:
    assert sum(len(message.value) for message in log.topic("shop/orders").read()) == 160_000_000
print(memory("VmHWM") - before)
"""


def test_shipping_and_reading_take_bounded_memory(s3_server: S3Server, tmp_path: Path) -> None:
    """An object of 160 MB is shipped and read back in less memory than it has bytes."""
    place = (tmp_path / "log", s3_server.url("memory"), s3_server.endpoint, ACCESS_KEY_ID, SECRET_ACCESS_KEY)
    finished = run_python(PROGRAM, *place)
    assert finished.returncode == 0, finished.stderr
    assert int(finished.stdout) < MOST_GROWTH_BYTES


# Puts 256 MiB from an iterator, ships them, reads them from the disk and from the store alone, in every way that is in
# pieces; tells by how much its memory grew at most.
STREAM = """
import asyncio, hashlib, sys, tidelog
directory, store, size = sys.argv[1], sys.argv[2], 256 << 20

def memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

def pieces(piece=bytes(range(256)) * 4096):
    for number in range(size // len(piece)):
        data = number.to_bytes(8, "little") + piece[8:]
        sums[0].update(data)
        yield data

def digest_of(found):
    sums[1] = hashlib.sha256()
    for piece in found:
        sums[1].update(piece)
    return sums[1].hexdigest()

sums = [hashlib.sha256(), hashlib.sha256()]
with tidelog.open_engine(directory, store=store, ship_interval_seconds=3600, local_retention_bytes=0) as engine:
    engine.apply(1, tidelog.CreateBucket("b"))
    engine.apply(2, tidelog.PutObject("b", "small", b"warm" * 1000))
    before = memory("VmRSS")
    engine.apply(3, tidelog.PutObject("b", "k", pieces()))
    expected = sums[0].hexdigest()
    for tier in ("hot", "cold"):
        with engine.open_object("b", "k") as file:
            assert (file.tier, file.size) == (tier, size)
            assert digest_of(iter(lambda: file.read(1 << 20), b"")) == expected
        found = hashlib.sha256()
        for offset in range(0, size, 4 << 20):
            found.update(engine.read("b", "k", offset=offset, length=4 << 20).data)
        assert found.hexdigest() == expected

        async def in_task():
            found = hashlib.sha256()
            async with await engine.open_object_async("b", "k") as file:
                async for piece in file:
                    found.update(piece)
            return found.hexdigest()

        assert asyncio.run(in_task()) == expected
        (change,) = engine.changes(3, with_values=True)
        assert digest_of(change.entry.data) == expected
        engine.update_low_water_mark(3)
        engine.ship()
print(memory("VmHWM") - before)
"""


def test_large_value_takes_bounded_memory_in_and_out(tmp_path: Path) -> None:
    """256 MiB are put from a stream, shipped, and read by pieces from disk and store, within 64 MiB."""
    finished = run_python(STREAM, tmp_path / "engine", f"file://{tmp_path / 'store'}")
    assert finished.returncode == 0, finished.stderr
    assert int(finished.stdout) < 64 * MIB
