"""Errors for people: what was wrong, what was expected, what to do. Shown as one message, never as a trace."""


class UserError(Exception):
    """A mistake or a condition that the person can do something about."""

    def __init__(self, message: str, hint: str = ""):
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message
