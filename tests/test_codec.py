"""Decoding documents from several threads."""

from __future__ import annotations

from tests.log.workbench import run_python

PROGRAM = """
import sys, threading
import msgspec
from tidelog.codec import from_json

sys.setswitchinterval(1e-6)
for _ in range(400):
    Inner = msgspec.defstruct("Inner", [("x", "int | None", None), ("y", int, 0)])
    Outer = msgspec.defstruct("Outer", [("i", Inner | None, None), ("l", list[Inner], []), ("n", int, 0)])
    together = threading.Barrier(3)

    def decode():
        together.wait()
        assert from_json(b'{"n": 1}', Outer).n == 1

    threads = [threading.Thread(target=decode) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("alive")
"""


def test_threads_that_decode_a_type_for_the_first_time_at_once_do_not_crash() -> None:
    """The process was killed by a segmentation fault inside msgspec when partitions were opened in parallel."""
    assert run_python(PROGRAM).stdout == "alive\n"
