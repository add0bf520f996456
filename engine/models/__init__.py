"""Weight readers and the decoder."""
