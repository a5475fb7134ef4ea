"""What canaries ask: prompts of distinct ordinary tokens, from a seed."""

from __future__ import annotations

from random import Random

from harness.guards.canary import PASS_TOKENS_MAX, PROMPTS_PER_PASS, TokenRows

PROMPT_COUNT = 8
PROMPT_TOKENS = (24, 28, PASS_TOKENS_MAX // PROMPTS_PER_PASS)  # of each attempt to tell two checkpoints apart
FIRST_ORDINARY_TOKEN = 3


def canary_prompts(vocabulary_size: int, *, seed: int, attempt: int = 0, count: int = PROMPT_COUNT) -> TokenRows:
    """Return the canary prompts as token ids; each attempt gives other and longer ones, the last the longest.

    No token comes twice before every ordinary one has come once, so that prompts read as many rows of the embedding as
    they can: `count` prompts of attempt 0 read 24 times as many.
    """
    random = Random(f"{seed}:canary:{attempt}")
    length = PROMPT_TOKENS[min(attempt, len(PROMPT_TOKENS) - 1)]
    tokens = _distinct_tokens(random, vocabulary_size, count * length)
    return tuple(tuple(tokens[first : first + length]) for first in range(0, count * length, length))


def deep_prompt(vocabulary_size: int, *, seed: int, length: int) -> tuple[int, ...]:
    """Return one long prompt as token ids."""
    return tuple(_distinct_tokens(Random(f"{seed}:deep"), vocabulary_size, length))


def _distinct_tokens(random: Random, vocabulary_size: int, count: int) -> list[int]:
    ordinary = range(FIRST_ORDINARY_TOKEN, vocabulary_size)
    tokens: list[int] = []
    while len(tokens) < count:
        tokens += random.sample(ordinary, len(ordinary))
    return tokens[:count]
