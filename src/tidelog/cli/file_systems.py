"""Which kind of file system a path is on, and which kinds do not keep what a log entrusts to them."""

from __future__ import annotations

from pathlib import Path

NETWORK_KINDS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "beegfs", "fuse.sshfs"}
    | {"fuse.s3fs", "fuse.rclone", "fuse.gcsfuse", "fuse.glusterfs", "fuse.ceph", "virtiofs", "vboxsf"}
)
MEMORY_KINDS = frozenset({"tmpfs", "ramfs"})
PASSING_KINDS = frozenset({"overlay", "aufs"})

_MOUNTS = Path("/proc/self/mounts")


def file_system_kind(path: Path) -> str | None:
    """The kind of the innermost mount that holds the path; None where the system does not tell."""
    try:
        lines = _MOUNTS.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return None
    resolved = path.resolve()
    # Of two mounts at one place the later one is seen, so the last of the longest wins.
    best: tuple[int, str] | None = None
    for line in lines:
        _, where, kind, *_ = line.split(" ")
        mount = Path(_unescape(where))
        if resolved.is_relative_to(mount) and (best is None or len(mount.parts) >= best[0]):
            best = (len(mount.parts), kind)
    return None if best is None else best[1]


def _unescape(text: str) -> str:
    """The kernel writes blanks and the like in octal."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
