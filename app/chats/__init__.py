"""The conversation store."""
