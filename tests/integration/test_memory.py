"""What shipping and reading history take of the memory does not grow with the history."""

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
