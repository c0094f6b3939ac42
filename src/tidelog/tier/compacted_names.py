"""How files of compacted data are called, below the place of their engine.

    data/{bucket}/{key}/v{seq:010}.dat                  one large body; bucket and key are escaped
    packs/pack-{generation:010}-{digest}.tpck           small bodies, many in one
    index/versions-{generation:010}-{digest}.trow       the version index: rows by key of the tree
    index/bodies-{generation:010}-{digest}.trow         the body index: rows by position in the log
    index/root-{generation:010}-{digest}.json           what a compaction consists of
    checkpoints/part-{seq}-{lsn}-{digest}.trow          rows of a state that has several files

Escaped: A-Z a-z 0-9 `-` and `.` stay, except for a dot in front; any other byte of the UTF-8 is `_` and two hex digits.

Invariants
- `digest` is BLAKE2b of the whole file, 16 bytes in hex: the same bytes have the same name, and a file that was begun
  twice is the same file.
- Building and parsing are inverse: a name that was not built here parses to None, and there is one spelling for each.
- No name has more characters than a store takes: a body whose name would be longer has no file (None).
"""

from __future__ import annotations

import hashlib
import re
from typing import Final, Literal, NamedTuple, get_args

from tidelog.errors import InputError

MAX_ESCAPED_LENGTH: Final = 200
DIGEST_BYTES: Final = 16
_MAX_NUMBER = (1 << 64) - 1

FileKind = Literal["pack", "versions", "bodies", "root"]
_FOLDERS: Final = {"pack": "packs", "versions": "index", "bodies": "index", "root": "index"}
_ENDINGS: Final = {"pack": "tpck", "versions": "trow", "bodies": "trow", "root": "json"}
_DIGEST = r"([0-9a-f]{32})"
_NUMBER = r"(0|[1-9][0-9]{0,19})"
_PADDED = r"([0-9]{10}|[1-9][0-9]{10,19})"
_FILE = re.compile(rf"(packs|index)/(pack|versions|bodies|root)-{_PADDED}-{_DIGEST}\.(tpck|trow|json)", re.ASCII)
_PART = re.compile(rf"part-{_NUMBER}-{_NUMBER}-{_DIGEST}\.trow", re.ASCII)
_DATA = re.compile(rf"([^/]+)/([^/]+)/v{_PADDED}\.dat", re.ASCII)
_OTHER_BYTES = re.compile(rb"[^A-Za-z0-9.-]")
_ESCAPED = re.compile(r"(?:[A-Za-z0-9-]|_[0-9a-f]{2})(?:[A-Za-z0-9.-]|_[0-9a-f]{2})*", re.ASCII)
_ESCAPE = re.compile(rb"_([0-9a-f]{2})")


class CompactedId(NamedTuple):
    """The name of a pack, of a file of an index, or of a root."""

    kind: FileKind
    generation: int
    digest: str

    def __str__(self) -> str:
        return f"{_FOLDERS[self.kind]}/{self.kind}-{self.generation:010d}-{self.digest}.{_ENDINGS[self.kind]}"


class StatePartId(NamedTuple):
    """The name of one file of a state."""

    seq: int
    lsn: int
    digest: str

    def __str__(self) -> str:
        return f"part-{self.seq}-{self.lsn}-{self.digest}.trow"


class DataFileId(NamedTuple):
    """Whose body a data file is: that of the entry which wrote it."""

    bucket: str
    key: str
    seq: int


def digest_of(data: bytes | memoryview) -> str:
    """What a file with these bytes has in its name."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def checked_compacted(name: CompactedId) -> CompactedId:
    """The same, or InputError."""
    if name.kind not in get_args(FileKind) or parse_compacted(str(name)) != name:
        raise InputError(f"{name!r} is not the name of a file of a compaction")
    return name


def parse_compacted(name: str) -> CompactedId | None:
    """The parts of a name below the engine's place; None for any other."""
    match = _FILE.fullmatch(name)
    if match is None:
        return None
    kind: FileKind = match[2]  # type: ignore[assignment]  # the pattern knows no others
    found = CompactedId(kind, int(match[3]), match[4])
    return found if str(found) == name and 1 <= found.generation <= _MAX_NUMBER else None


def checked_state_part(name: StatePartId) -> StatePartId:
    """The same, or InputError."""
    if parse_state_part(str(name)) != name:
        raise InputError(f"{name!r} is not the name of a file of a state")
    return name


def parse_state_part(name: str) -> StatePartId | None:
    """The parts of a name below `checkpoints/`; None for any other."""
    match = _PART.fullmatch(name)
    if match is None:
        return None
    found = StatePartId(int(match[1]), int(match[2]), match[3])
    return found if max(found.seq, found.lsn) <= _MAX_NUMBER else None


def data_name(bucket: str, key: str, seq: int) -> str | None:
    """The name of a body's file below `data/`; None when it would be too long for one."""
    if not bucket or not key or not 0 <= seq <= _MAX_NUMBER:
        raise InputError(f"version {seq} of {bucket!r}/{key!r} cannot be a file")
    escaped = escape(bucket), escape(key)
    if max(map(len, escaped)) > MAX_ESCAPED_LENGTH:
        return None
    return f"{escaped[0]}/{escaped[1]}/v{seq:010d}.dat"


def parse_data_name(name: str) -> DataFileId | None:
    """Whose body it is; None for a name that we would not have built."""
    match = _DATA.fullmatch(name)
    if match is None:
        return None
    bucket, key, seq = _unescaped(match[1]), _unescaped(match[2]), int(match[3])
    if bucket is None or key is None or seq > _MAX_NUMBER:
        return None
    found = DataFileId(bucket, key, seq)
    return found if data_name(*found) == name else None


def escape(text: str) -> str:
    """A name as one part of a key."""
    escaped = _OTHER_BYTES.sub(lambda match: b"_%02x" % match[0][0], text.encode()).decode("ascii")
    return "_2e" + escaped[1:] if escaped.startswith(".") else escaped


def _unescaped(text: str) -> str | None:
    if _ESCAPED.fullmatch(text) is None:
        return None
    try:
        return _ESCAPE.sub(lambda match: bytes((int(match[1], 16),)), text.encode("ascii")).decode()
    except UnicodeDecodeError:
        return None
