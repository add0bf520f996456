"""Prompts of a wanted length, made of plain words, the same on every machine."""

from __future__ import annotations

import random

WORDS = (
    "river stone market garden window letter quiet morning bridge engine lantern harbour copper winter "
    "signal paper meadow ticket station kettle amber thread mirror valley pocket silver candle island "
    "teacher number corner shadow planet coffee violin timber ribbon orchard puzzle captain"
).split()


def words(num_words: int, seed: int) -> str:
    """Sentences of 6 to 14 words."""
    source = random.Random(seed)
    sentences = []
    while num_words > 0:
        length = min(num_words, source.randint(6, 14))
        sentences.append(" ".join(source.choice(WORDS) for _ in range(length)).capitalize() + ".")
        num_words -= length
    return " ".join(sentences)


def prompt_of(num_tokens: int, seed: int) -> str:
    """About `num_tokens` tokens with the default model's tokenizer (1.12 a word, seen), and a few of the template's."""
    return words(int(num_tokens / 1.12), seed)
