"""Forks own the blocks that they took over, so that deleting the chat they came from leaves these in place."""

from __future__ import annotations

import logging

from chatkv.app.errors import UserError
from chatkv.engine.errors import EngineError

from .chat_prompt import PromptMaker
from .chats_thread import ChatsThread
from .errors import ApiError
from .model_manager import ModelManager
from .owners import Owners

log = logging.getLogger(__name__)
MAX_WAITING = 256


class Forks:
    """Which blocks a fork needs is known once its path is rendered, which takes its model. Lives on the event loop."""

    def __init__(self, chats: ChatsThread, models: ModelManager, prompts: PromptMaker, owners: Owners):
        self._chats = chats
        self._models = models
        self._prompts = prompts
        self._owners = owners
        self._waiting: list[tuple[str, str]] = []
        """(fork, source)"""

    async def add(self, fork_id: str, source_id: str) -> None:
        """Share now, or when the model is loaded."""
        self._waiting = [*self._waiting, (fork_id, source_id)][-MAX_WAITING:]
        await self.share()

    async def share(self) -> None:
        """All that the loaded model allows."""
        waiting, self._waiting = self._waiting, []
        for fork_id, source_id in waiting:
            try:
                is_shared = await self._share(fork_id, source_id)
            except (UserError, EngineError, ApiError) as error:
                log.info("a fork shares no blocks: %s", error)
                continue
            if not is_shared:
                self._waiting.append((fork_id, source_id))

    async def _share(self, fork_id: str, source_id: str) -> bool:
        chat = await self._chats.run(lambda store: store.get_chat(fork_id))
        model = self._models.loaded
        if model is None or self._models.resolve(chat.model).name != model.name:
            return False
        token_ids = await self._prompts.next_prefix(model, chat)
        hashes = model.hash_blocks(token_ids)
        await self._owners.share(fork_id, source_id, model.fingerprint, len(token_ids), hashes)
        return True
