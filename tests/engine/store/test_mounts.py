"""Which file system a folder lies on, from lines as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from chatkv.engine.errors import StoreUnavailableError
from chatkv.engine.store.mounts import is_network, mount_of, refuse_network

MOUNTS = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
30 27 0:40 / /home rw,relatime shared:2 master:1 - nfs4 server:/home rw,vers=4.2
31 30 0:41 / /home/me/local rw - btrfs /dev/vdb rw,subvol=/@
32 27 0:42 / /mnt/my\040share rw - cifs //server/share rw
33 27 0:43 / /over rw - ext4 /dev/vdc rw
34 33 0:44 / /over rw - fuse.sshfs me@host: rw
35 27 0:45 / /homework rw - tmpfs tmpfs rw
not a line
"""


@pytest.mark.parametrize(
    ("path", "fs_type"),
    [
        ("/var/cache", "ext4"),
        ("/home/me/.cache", "nfs4"),
        ("/home/me/local", "btrfs"),
        ("/home/me/local/kv", "btrfs"),
        ("/home/me/locally", "nfs4"),
        ("/mnt/my share/kv", "cifs"),
        ("/over/there", "fuse.sshfs"),
        ("/homework", "tmpfs"),
    ],
)
def test_the_innermost_and_last_mount_counts(path: str, fs_type: str) -> None:
    mount = mount_of(Path(path), MOUNTS)
    assert mount is not None
    assert mount.fs_type == fs_type


def test_a_link_is_followed(folder: Path) -> None:
    (folder / "link").symlink_to("/over")
    mount = mount_of(folder / "link", MOUNTS)
    assert mount is not None
    assert mount.fs_type == "fuse.sshfs"


@pytest.mark.parametrize(
    "fs_type", ["nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "fuse.rclone", "ceph", "lustre"]
)
def test_network_file_systems_are_known(fs_type: str) -> None:
    assert is_network(fs_type)


@pytest.mark.parametrize("fs_type", ["ext4", "btrfs", "tmpfs", "xfs", "overlay", "fuseblk", "fuse.gocryptfs", "zfs"])
def test_local_ones_are_fine(fs_type: str) -> None:
    assert not is_network(fs_type)


def test_the_refusal_says_what_where_and_what_to_do(folder: Path) -> None:
    mountinfo = folder / "mountinfo"
    mountinfo.write_text(f"1 0 0:1 / / rw - ext4 a rw\n2 1 0:2 / {folder} rw - nfs4 server:/x rw\n")
    with pytest.raises(StoreUnavailableError) as caught:
        refuse_network(folder, mountinfo)
    for word in (str(folder), "nfs4", "network", "CHATKV_HOME"):
        assert word in str(caught.value)
    refuse_network(Path("/"), mountinfo)
    refuse_network(folder, folder / "missing")
