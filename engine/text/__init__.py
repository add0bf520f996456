"""Tokenizer, templates, token-exact transcripts, streaming text."""
