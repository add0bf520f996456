"""Prompts of a wanted length, made of plain words, the same on every machine."""

from __future__ import annotations

import random

WORDS = (
    "river stone market garden window letter quiet morning bridge engine lantern harbour copper winter "
    "signal paper meadow ticket station kettle amber thread mirror valley pocket silver candle island "
    "teacher number corner shadow planet coffee violin timber ribbon orchard puzzle captain"
).split()


def words(num_words: int, seed: int) -> str:
    """About 1.3 tokens a word with the default model's tokenizer."""
    source = random.Random(seed)
    sentences = []
    while num_words > 0:
        length = min(num_words, source.randint(6, 14))
        sentences.append(" ".join(source.choice(WORDS) for _ in range(length)).capitalize() + ".")
        num_words -= length
    return " ".join(sentences)


def prompt_of(num_tokens: int, seed: int) -> str:
    return words(int(num_tokens / 1.28), seed)
