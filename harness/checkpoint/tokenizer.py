"""A byte-level tokenizer for made checkpoints: every byte has an id, and so has every id of the vocabulary."""

from __future__ import annotations

import json
from itertools import chain, product
from pathlib import Path
from string import ascii_lowercase, printable

from harness.errors import UsageError

PAD, BOS, EOS = 0, 1, 2
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
MINIMUM_VOCABULARY = len(SPECIAL_TOKENS) + 256


def byte_alphabet() -> tuple[str, ...]:
    """Return the printable character that stands for each byte in byte-level tokenizers (GPT-2's table)."""
    printable_bytes = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = 0
    table = []
    for byte in range(256):
        if byte in printable_bytes:
            table.append(chr(byte))
        else:
            table.append(chr(256 + shifted))
            shifted += 1
    return tuple(table)


def write_byte_tokenizer(target: Path, *, vocabulary: int) -> None:
    """Write tokenizer.json and tokenizer_config.json with exactly `vocabulary` ids.

    Ids: 3 special tokens, 256 bytes, then pairs of bytes merged in a fixed order (letters first).
    Raises: UsageError when there are not enough pairs.
    """
    alphabet = byte_alphabet()
    letters = [alphabet[ord(letter)] for letter in ascii_lowercase]
    visible = [alphabet[ord(character)] for character in printable]
    pairs = list(dict.fromkeys(chain(product(letters, repeat=2), product(visible, repeat=2))))
    wanted = vocabulary - MINIMUM_VOCABULARY
    if not 0 <= wanted <= len(pairs):
        limit = MINIMUM_VOCABULARY + len(pairs)
        raise UsageError(f"vocabulary is {vocabulary}, expected {MINIMUM_VOCABULARY} to {limit}")
    merges = pairs[:wanted]
    tokens = [*SPECIAL_TOKENS, *alphabet, *("".join(pair) for pair in merges)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": token, **flags} for number, token in enumerate(SPECIAL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [list(pair) for pair in merges],
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[EOS],
        "pad_token": SPECIAL_TOKENS[PAD],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    for name, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", settings)):
        (target / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
