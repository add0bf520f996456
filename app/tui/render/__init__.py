"""Text to lines: pure functions, without Textual and without I/O."""
