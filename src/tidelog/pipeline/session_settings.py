"""What a session of ours sets, and why.

Invariant: every entry is a default. What the caller names wins, and Spark works without any of them.
"""

from __future__ import annotations

import os
import re

JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_FEWEST_SHUFFLE_PARTITIONS = 4

DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Times of messages are instants. Shown in UTC they look the same on every machine that runs a job.
    "spark.sql.session.timeZone": "UTC",
}

LOCAL_DEFAULTS = {
    # Nobody else has to reach a driver whose executors are in it, and no name has to be looked up.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # The executors' share is in it too. Java takes it only as it needs it.
    "spark.driver.memory": "2g",
    # The checkpoint of a local stream is in local files. Spark's default manager starts programs to look for links;
    # this one writes and renames in the same order, through the older interface.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}


def defaults_for(master: str) -> dict[str, str]:
    """The defaults for a master."""
    if not master.startswith("local"):
        return dict(DEFAULTS)
    # 200, Spark's own default, are 200 files a micro-batch of a stream that aggregates.
    partitions = max(_FEWEST_SHUFFLE_PARTITIONS, 2 * cores_of(master))
    return DEFAULTS | LOCAL_DEFAULTS | {"spark.sql.shuffle.partitions": str(partitions)}


def cores_of(master: str) -> int:
    """How many tasks a local master runs at once."""
    match = re.match(r"local\[(\d+|\*)", master)
    if match is None:
        return 1
    return (os.cpu_count() or 1) if match[1] == "*" else int(match[1])


def text_of(value: object) -> str:
    """A setting the way Spark writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
