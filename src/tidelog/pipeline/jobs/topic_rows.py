"""The rows of topics for a job: the source with the job's own root, between offsets that were settled before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from tidelog.pipeline.root import Root

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_rows(spark: SparkSession, root: Root, offsets: Mapping[str, tuple[int, int]], **options: object) -> DataFrame:
    """The messages of these topics, each from its first offset up to its end (exclusive)."""
    reader = spark.read.format("tidelog").option("subscribe", ",".join(offsets))
    starts = {name: {"0": first} for name, (first, _) in offsets.items()}
    ends = {name: {"0": end} for name, (_, end) in offsets.items()}
    given = {
        **root_options(root),
        "startingOffsets": msgspec.json.encode(starts).decode(),
        "endingOffsets": msgspec.json.encode(ends).decode(),
        **options,
    }
    for name, value in given.items():
        reader = reader.option(name, str(value))
    return reader.load()


def root_options(root: Root) -> dict[str, str]:
    """A root as the options of the source and of the sink."""
    place = {"root": root.location} if root.metadata is None else {"root": root.location, "metadata": root.metadata}
    return {**root.settings, **place}
