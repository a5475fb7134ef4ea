"""The prefix cache: keys and values of the beginnings of prompts, so that a prompt that comes again is not computed anew."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from harness.engine.reference.model import Floats, KvCache

BLOCK_TOKENS = 16
ENTRIES_MAX = 64

_Entry = tuple[Floats, Floats]  # keys and values of every layer


class PrefixCache:
    """Keeps whole blocks; requests with different salts never share one."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[str, tuple[int, ...]], _Entry] = OrderedDict()

    def fill(self, cache: KvCache, prompt: Sequence[int], *, salt: str) -> int:
        """Copy the longest known beginning of a prompt into an empty cache and return its tokens; one is always computed."""
        for count in range((len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS, 0, -BLOCK_TOKENS):
            key = (salt, tuple(prompt[:count]))
            if key in self._entries:
                self._entries.move_to_end(key)
                cache.keys[:, :, :count], cache.values[:, :, :count] = self._entries[key]
                cache.length_tokens = count
                return count
        return 0

    def store(self, cache: KvCache, prompt: Sequence[int], *, salt: str) -> None:
        """Keep the whole blocks of a prompt that was computed."""
        count = (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        key = (salt, tuple(prompt[:count]))
        if count == 0 or key in self._entries:
            return
        self._entries[key] = (cache.keys[:, :, :count].copy(), cache.values[:, :, :count].copy())
        while len(self._entries) > ENTRIES_MAX:
            self._entries.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
