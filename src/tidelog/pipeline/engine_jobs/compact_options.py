"""How an engine is compacted: the options of the job, checked."""

from __future__ import annotations

import msgspec

from tidelog.engine.compacted import Compaction
from tidelog.errors import InputError
from tidelog.pipeline.engine_jobs.bodies_plan import DEFAULT_LARGE_BYTES, DEFAULT_PACK_BYTES
from tidelog.pipeline.engine_jobs.bodies_read import BodyCodec
from tidelog.pipeline.engine_jobs.index_survey import ROWS_PER_FILE


class CompactEngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is compacted.

    large_bytes     bodies of so many stored bytes or more are files (1 MiB); can be given the first time only
    pack_bytes      how many bytes of bodies are in a pack, about
    codec           how bodies are stored in packs; None: as the engine stored them
    keep_from       the history begins here from now on; what only older seqs would show is left out
    keep_versions   so many versions of each object stay that are not above `keep_from`
    """

    large_bytes: int | None = None
    pack_bytes: int = DEFAULT_PACK_BYTES
    codec: BodyCodec | None = None
    keep_from: int | None = None
    keep_versions: int = 1
    rows_per_file: int = ROWS_PER_FILE
    is_dry_run: bool = False


def checked_options(options: CompactEngineOptions) -> CompactEngineOptions:
    """The same, or InputError."""
    for name in ("pack_bytes", "keep_versions", "rows_per_file"):
        if getattr(options, name) < 1:
            raise InputError(f"{name} is at least 1, not {getattr(options, name)}")
    if options.keep_versions > 1 and options.keep_from is None:
        raise InputError(
            "keep_versions says how many versions stay below the start of history, and none is given",
            hint="Give keep_from too",
        )
    if options.codec not in (None, "none", "zstd"):
        raise InputError(f"codec is none or zstd, not {options.codec}")
    return options


def large_bytes_of(options: CompactEngineOptions, previous: Compaction | None) -> int:
    """From how many bytes on a body is a file. The first compaction decides it, for those that follow."""
    if previous is None:
        large_bytes = DEFAULT_LARGE_BYTES if options.large_bytes is None else options.large_bytes
        if large_bytes < 1:
            raise InputError(f"large_bytes is at least 1, not {large_bytes}")
        return large_bytes
    if options.large_bytes not in (None, previous.large_bytes):
        raise InputError(
            f"bodies of {previous.large_bytes} bytes or more are files in this engine's store: the first compaction "
            f"said so, and it stays",
            hint="Leave large_bytes out",
        )
    return previous.large_bytes
