"""Which installed model a request means."""

from __future__ import annotations

from typing import Protocol

from chatkv.app.errors import UserError
from chatkv.app.hub.installed import InstalledModel
from chatkv.app.settings import Settings

from .errors import ApiError
from .last_model import LastModel

ALIASES = frozenset({"", "default", "local"})


class Installed(Protocol):
    """The installed models; see `chatkv.app.hub.installed`."""

    def list(self) -> list[InstalledModel]: ...

    def get(self, name: str) -> InstalledModel: ...

    def remove(self, name: str) -> None: ...


class ModelChoice:
    def __init__(self, installed: Installed, settings: Settings, last_model: LastModel):
        self._installed = installed
        self._settings = settings
        self._last_model = last_model

    def resolve(self, model_id: str | None, current_name: str | None) -> InstalledModel:
        """`current_name`: the model that is or was loaded, which no name at all means.

        Raises:
            ApiError: 404 naming what is installed; 400 when the model's folder is damaged.
        """
        wanted = (model_id or "").strip()
        if wanted in ALIASES or (self._settings.any_model and not self.is_installed(wanted)):
            wanted = current_name or self.default_name()
        try:
            return self._installed.get(wanted)
        except UserError as error:
            if self.is_installed(wanted):
                raise ApiError(400, str(error), "model_unusable", param="model") from error
            names = ", ".join(model.name for model in self._installed.list()) or "none; get one with: chatkv pull"
            raise ApiError(
                404, f"The model '{wanted}' is not installed. Installed: {names}.", "model_not_found", param="model"
            ) from error

    def is_installed(self, name: str) -> bool:
        return any(model.name == name for model in self._installed.list())

    def default_name(self) -> str:
        """The last used, else the setting's, else the only one there is."""
        names = [model.name for model in self._installed.list() if model.is_usable]
        for name in (self._last_model.read(), self._settings.model):
            if name in names:
                return name
        return names[0] if names else self._settings.model
