"""Where everything lives: one folder per kind by the platform's rules, or all under `CHATKV_HOME`."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import platformdirs

from .errors import UserError

MAX_SOCKET_PATH_BYTES = 100
"""The kernel's limit is 107; some clients copy the path into a smaller buffer."""
SHORT_SOCKETS_DIR = Path("/tmp")
"""Not TMPDIR: client and service must come to the same path from whatever environment they were started in."""


@dataclass(frozen=True)
class Paths:
    config_dir: Path
    data_dir: Path
    cache_dir: Path
    state_dir: Path
    runtime_dir: Path

    @classmethod
    def from_env(cls) -> Paths:
        """`CHATKV_HOME` when set (two homes run side by side), else platformdirs.

        Raises:
            UserError: the environment does not say where the person's home is.
        """
        if home := os.environ.get("CHATKV_HOME"):
            return cls.under(Path(os.path.expanduser(home)).absolute())
        dirs = platformdirs.PlatformDirs("chatkv", appauthor=False)
        try:
            kinds = (dirs.user_config_dir, dirs.user_data_dir, dirs.user_cache_dir, dirs.user_state_dir)
        except RuntimeError:  # Older ones answer with a relative path instead.
            kinds = ("", "", "", "")
        config, data, cache, state = map(Path, kinds)
        if not all(folder.is_absolute() for folder in (config, data, cache, state)):
            raise UserError("There is no home directory.", "Set HOME, or CHATKV_HOME to a folder of your own.")
        # The socket lies with the state, not in XDG_RUNTIME_DIR: that is another one, or none, in cron, in a container
        # or after `su`, and it goes away at logout while the service goes on.
        return cls(config, data, cache, state, state)

    @classmethod
    def under(cls, root: Path) -> Paths:
        """Everything in one folder."""
        return cls(root / "config", root / "data", root / "cache", root / "state", root / "run")

    @property
    def settings_file(self) -> Path:
        return self.config_dir / "settings.toml"

    @property
    def models_dir(self) -> Path:
        return self.data_dir / "models"

    @property
    def chats_db(self) -> Path:
        return self.data_dir / "chats.db"

    @property
    def downloads_dir(self) -> Path:
        """Partial downloads, kept for resumption."""
        return self.cache_dir / "downloads"

    @property
    def kv_dir(self) -> Path:
        return self.cache_dir / "kv"

    @property
    def service_lock(self) -> Path:
        return self.state_dir / "service.lock"

    @property
    def key_file(self) -> Path:
        """Bearer key of the TCP socket, 0600."""
        return self.state_dir / "api.key"

    @property
    def store_key_file(self) -> Path:
        """32 random bytes that key the block hashes, 0600."""
        return self.state_dir / "store.key"

    @property
    def kv_key_file(self) -> Path:
        """32 random bytes that the disk store is encrypted with, where that is wished, 0600."""
        return self.state_dir / "kv.key"

    @property
    def kv_quota_file(self) -> Path:
        """The disk store's size as chosen at the first start, in bytes."""
        return self.state_dir / "kv_quota"

    @property
    def last_model_file(self) -> Path:
        """Name of the model that was used last."""
        return self.state_dir / "last_model"

    @property
    def log_file(self) -> Path:
        return self.state_dir / "service.log"

    @cached_property
    def socket_path(self) -> Path:
        """The unix socket; a short path in an owned 0700 directory when the natural one would be too long."""
        natural = self.runtime_dir / "chatkv.sock"
        if len(os.fsencode(natural)) <= MAX_SOCKET_PATH_BYTES:
            return natural
        digest = hashlib.sha256(os.fsencode(natural)).hexdigest()[:12]
        return SHORT_SOCKETS_DIR / f"chatkv-{os.getuid()}-{digest}" / "chatkv.sock"

    def make_private(self) -> None:
        """Create every folder that holds state, 0700.

        Raises:
            UserError: a folder cannot be made, or belongs to someone else.
        """
        for folder in (self.config_dir, self.data_dir, self.models_dir, self.cache_dir, self.state_dir):
            make_private_dir(folder)
        # It may lie in a folder that everybody can write to: no link there is to be trusted.
        make_private_dir(self.socket_path.parent, may_be_link=False)


def make_private_dir(folder: Path, *, may_be_link: bool = True) -> None:
    """Make `folder` (and parents) and see that it is ours and closed to others.

    Raises:
        UserError: it cannot be made, is no folder, or belongs to someone else.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat() if may_be_link else folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise UserError(f"{folder} is not a directory.", "Remove it, or set CHATKV_HOME to another folder.")
        if status.st_uid != os.getuid():
            raise UserError(f"{folder} belongs to another user.", "Set CHATKV_HOME to a folder of your own.")
        if stat.S_IMODE(status.st_mode) & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        raise UserError(
            f"Cannot use the folder {folder}: {error.strerror}.", "Set CHATKV_HOME to a folder you can write to."
        ) from error
