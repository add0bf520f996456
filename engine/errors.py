"""Errors that a person or a client can cause. Each says what was wrong, what was expected and what to do."""


class EngineError(Exception):
    """Base of everything the engine refuses on purpose."""


class UnsupportedModelError(EngineError):
    """The file is fine, but its architecture or a tensor type is not one that chatkv runs."""


class BrokenModelError(EngineError):
    """A weight or tokenizer file is damaged, incomplete or not what its name says."""


class ModelStorageError(EngineError):
    """A model's files must be rewritten, and the disk does not let us: no space, no permission."""


class TemplateError(EngineError):
    """The model's chat template refused these messages."""


class InvalidRequestError(EngineError):
    """A request field has a value that can never work. `param` names the field."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class PromptTooLongError(EngineError):
    """The prompt can never fit: longer than the context, or than the whole pool."""

    def __init__(self, num_prompt_tokens: int, max_context_tokens: int):
        super().__init__(
            f"This model's maximum context length is {max_context_tokens} tokens, but the prompt has "
            f"{num_prompt_tokens}: it exceeds the context window. Shorten it, drop old turns, or start a new chat."
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_context_tokens = max_context_tokens


class QueueFullError(EngineError):
    """The bounded waiting queue is full; retry after `retry_after_s` seconds."""

    def __init__(self, num_waiting: int, retry_after_s: int = 5):
        super().__init__(
            f"{num_waiting} requests are waiting already, which is the limit. Try again in {retry_after_s} s."
        )
        self.retry_after_s = retry_after_s


class EngineClosedError(EngineError):
    """The engine is stopping, or another model is about to take its place."""


class StoreUnavailableError(EngineError):
    """The disk store cannot be used here; everything else works, from memory only."""


class OwnersGoneError(EngineError):
    """Whoever was to own a block is gone meanwhile, so the block must not be stored. Raised to the store, for which it
    is no fault."""
