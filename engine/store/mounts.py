"""What kind of file system a path lies on. Network file systems do not keep what locks, holes and syncs promise."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from ..errors import StoreUnavailableError

MOUNTINFO = Path("/proc/self/mountinfo")

_NETWORK_TYPES = frozenset(
    "nfs nfs4 cifs smb2 smb3 smbfs 9p afs ceph coda gfs gfs2 glusterfs gpfs lustre ncpfs ocfs2 orangefs pvfs2 beegfs "
    "panfs vboxsf prl_fs davfs acfs".split()
)
_NETWORK_FUSE = tuple(
    "sshfs s3fs rclone gcsfuse glusterfs ceph davfs gvfs curlftpfs smbnetfs juicefs goofys mount-s3 blobfuse seaweedfs "
    "mfs hdfs vmhgfs grpcfuse".split()
)


class Mount(NamedTuple):
    point: str
    fs_type: str


def mount_of(path: Path, mountinfo: str) -> Mount | None:
    """The mount that an existing `path` lies on; `mountinfo`: text as in proc(5). None: not in it."""
    real = os.path.realpath(path)
    found: Mount | None = None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, types = before.split(), after.split()
        if len(fields) < 5 or not types:
            continue
        point = _unescaped(fields[4])
        # Of several mounts on one point, the last covers the others.
        if _is_in(real, point) and (found is None or len(point) >= len(found.point)):
            found = Mount(point, types[0])
    return found


def refuse_network(directory: Path, mountinfo_file: Path = MOUNTINFO) -> None:
    """Raises StoreUnavailableError for an existing `directory` on a network file system. Where the mounts cannot be
    read, nothing is refused."""
    try:
        mountinfo = mountinfo_file.read_text(errors="surrogateescape")
    except OSError:
        return
    mount = mount_of(directory, mountinfo)
    if mount is not None and is_network(mount.fs_type):
        raise StoreUnavailableError(
            f"{directory} lies on a network file system ({mount.fs_type}, mounted at {mount.point}), where the cache "
            "could be damaged. Set CHATKV_HOME (or XDG_CACHE_HOME) to a folder on a local disk."
        )


def is_network(fs_type: str) -> bool:
    if fs_type.startswith("fuse."):
        return any(name in fs_type for name in _NETWORK_FUSE)
    return fs_type in _NETWORK_TYPES


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _is_in(path: str, point: str) -> bool:
    return path == point or path.startswith(point if point.endswith("/") else point + "/")
