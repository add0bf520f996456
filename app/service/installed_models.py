"""The installed models of one home, as the model manager wants them."""

from __future__ import annotations

from chatkv.app.hub import installed
from chatkv.app.hub.installed import InstalledModel
from chatkv.app.paths import Paths


class InstalledModels:
    def __init__(self, paths: Paths):
        self._paths = paths

    def list(self) -> list[InstalledModel]:
        return installed.list_installed(self._paths)

    def get(self, name: str) -> InstalledModel:
        """Raises UserError: not installed, damaged, or no possible name."""
        return installed.get_installed(self._paths, name)

    def remove(self, name: str) -> None:
        installed.remove(self._paths, name)
