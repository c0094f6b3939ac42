"""What a SeaweedFS of ours keeps in its directory, and who may use it.

    <directory>/s3.json         the keys, in SeaweedFS's own form; only its owner can read it
    <directory>/seaweedfs.log   what the server said
    <directory>/data/           the server's own files
    <directory>/lock            held as long as a server runs

Invariants
- The keys are made once, and are readable for their owner alone from their first moment on.
- One server at a time uses the directory. The server itself inherits the lock: it holds as long as the server lives,
  even when whoever started it was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from pathlib import Path
from typing import Any

from tidelog.cli.s3_request import S3Keys
from tidelog.errors import DataError, RetryError
from tidelog.files import LocalFiles, explained, open_regular, refuse_link, refuse_other_kinds
from tidelog.secret import Secret

_ACTIONS = ["Admin", "Read", "Write", "List", "Tagging"]
_LOG_BYTES = 16 << 20


class SeaweedDirectory:
    """Made when absent. Its files are for nobody but their owner."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.config = self.path / "s3.json"
        self.log = self.path / "seaweedfs.log"
        self.data = self.path / "data"
        with explained("make", self.path):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            refuse_link(self.data)
            self.data.mkdir(mode=0o700, exist_ok=True)

    def keys(self, wanted: S3Keys | None = None) -> S3Keys:
        """Those that were made here before, else `wanted`, else new ones."""
        with explained("read", self.config):
            refuse_other_kinds(self.config)
            if not self.config.exists():
                self._write_keys(wanted or _new_keys())
            self.config.chmod(0o600)
            return _parse(self.config)

    def _write_keys(self, keys: S3Keys) -> None:
        credentials = [{"accessKey": keys.access_key_id, "secretKey": keys.secret_access_key.reveal()}]
        identity = {"name": "tidelog", "credentials": credentials, "actions": _ACTIONS}
        unfinished = self.config.with_suffix(".tmp")
        with contextlib.suppress(FileNotFoundError):
            unfinished.unlink()
        # Not made and then closed to others: it is never open to them.
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"identities": [identity]}, file, indent=2)
            file.flush()
            os.fsync(descriptor)
        unfinished.rename(self.config)
        LocalFiles().sync_directory(self.path)

    def open_log(self) -> int:
        """A descriptor to write to; a log that has grown long is begun anew."""
        with explained("write", self.log):
            is_long = self.log.exists() and self.log.stat().st_size > _LOG_BYTES
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if is_long else 0)
            return open_regular(self.log, flags, 0o600)

    def take(self) -> int:
        """The descriptor of the lock, to be inherited by the server and closed when that has ended."""
        path = self.path / "lock"
        with explained("lock", path):
            descriptor = open_regular(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            hint = "Stop it, or name another directory with --data"
            raise RetryError(f"{self.path} is used by another server (process {owner or '?'})", hint=hint) from None
        return descriptor

    @staticmethod
    def note_owner(lock: int, pid: int) -> None:
        """Only for the message above; a full disk must not keep a server from running."""
        with contextlib.suppress(OSError):
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(pid).encode("ascii"), 0)


def _new_keys() -> S3Keys:
    return S3Keys(f"tidelog-{secrets.token_hex(6)}", Secret(secrets.token_urlsafe(30)))


def _parse(path: Path) -> S3Keys:
    try:
        content: Any = json.loads(path.read_bytes())
        found = content["identities"][0]["credentials"][0]
        key_id, secret = found["accessKey"], found["secretKey"]
    except (ValueError, LookupError, TypeError):
        key_id, secret = None, None
    if not isinstance(key_id, str) or not isinstance(secret, str) or not key_id or not secret:
        raise DataError("there are no keys in this file", path=path, hint="Remove it to get new ones")
    return S3Keys(key_id, Secret(secret))
