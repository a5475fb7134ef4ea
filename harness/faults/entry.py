"""What is said of one fault in the catalogue."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One fault. `cost` says what is written: a damage of one shard takes about the time of copying that shard."""

    what: str
    by_hand: str
    reports: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # "old": leaves parts of the old checkpoint behind; others are said in words
    cost: str = "one shard"


SMALL, EVERY, OLD, NOTHING = "a small file", "every shard", "the old weights", "nothing on disk"
REWRITE = "with `safetensors`: `t = load_file(f); {}; save_file(t, f)`, on a copy, and the weight index kept in step where names change"
EDIT = "on a copy: `python -c \"import json; c = json.load(open('config.json')); {}; json.dump(c, open('config.json', 'w'))\"`"
