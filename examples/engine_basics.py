"""An engine from its first entry to a lost disk: apply, read as of a seq, roll back, ship, restore.

python examples/engine_basics.py [DIRECTORY]
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import tidelog
from tidelog import Batch, CopyObject, CreateBucket, DeleteObject, PutObject


def main(directory: Path) -> None:
    """Runs in a directory; another one beside it plays the bucket."""
    store = (directory / "bucket").absolute().as_uri()  # s3://bucket/prefix in earnest
    with tidelog.open_engine(directory / "engine", store=store) as engine:
        # Seqs are the orchestrator's: any numbers that grow. An apply returns once it is on the disk.
        engine.apply(1, CreateBucket("photos"))
        engine.apply(2, PutObject("photos", "cat", b"meow", {"type": "sound"}))
        engine.apply_many([(seq, PutObject("photos", f"cat-{seq}", b"%d" % seq * 100)) for seq in range(3, 100)])

        # A batch is applied together or refused together; a refusal is a result, the same on every replica.
        engine.apply(100, Batch([CopyObject("photos", "cat", "photos", "dog"), DeleteObject("photos", "cat")]))
        print("refused:", engine.apply(101, PutObject("films", "cat", b"")).reason)

        # Every state can be read.
        print("now:", [item.key for item in engine.list_objects("photos", prefix="dog")])
        print("at seq 50:", engine.read("photos", "cat", seq=50).data)
        print("versions of cat:", [(one.seq, one.is_deleted) for one in engine.versions("photos", "cat")])

        # The orchestrator threw its newest entry away: so does the engine.
        engine.apply(102, DeleteObject("photos", "dog"))
        engine.rollback_to(101)
        print("rolled back:", engine.read("photos", "dog").data)

        # All replicas have everything up to 101: it may be shipped, and the orchestrator may forget it then.
        engine.update_low_water_mark(101)
        engine.ship()
        engine.create_checkpoint()
        print("shipped:", engine.high_water_mark, "truncate up to:", engine.truncation_mark)
        digest = engine.digest()

    shutil.rmtree(directory / "engine")
    with tidelog.restore_engine(directory / "restored", store=store) as engine:
        print("restored:", engine.applied_seq, engine.read("photos", "dog"))
        print("same digest:", engine.digest() == digest)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
