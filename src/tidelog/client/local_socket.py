"""The socket in a log directory by which its server is reached on the same machine.

Invariants
- It is in the directory that is served and only its owner may open it, so who may use the directory may use the socket.
- A path of any length works: a socket's own may have 107 bytes, so a longer one is named through its directory.
- A socket that a killed server left behind refuses connections: it counts as none, and the next server replaces it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

NAME = ".tidelog.sock"
_MAX_PATH_BYTES = 107
_ANSWER_SECONDS = 5.0


def socket_of(directory: Path) -> Path:
    """Where the socket of a served directory is."""
    return directory / NAME


@contextlib.contextmanager
def short_path(path: str) -> Iterator[str]:
    """The same file by a path that is short enough for a socket, for the time of the context."""
    if len(os.fsencode(path)) <= _MAX_PATH_BYTES:
        yield path
        return
    parent = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{parent}/{os.path.basename(path)}"
    finally:
        os.close(parent)


def is_served(directory: Path) -> bool:
    """Whether a server answers on the socket of a directory."""
    path = socket_of(directory)
    if not path.is_socket():
        return False
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.settimeout(_ANSWER_SECONDS)
        try:
            with short_path(str(path)) as short:
                probe.connect(short)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # it is there, and busy or not ours: what is asked of it says which
    return True
