"""Decide whether the engine's parser takes a value for an option, and say what it wants instead."""

from __future__ import annotations

import difflib
import json
import re
from typing import Any

from harness.guards.releases import LaunchOption

SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
MAX_DIGITS = 30
FACTORS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
JSON_TEXT = re.compile(r'("(?:[^"\\]|\\.)*")')
MEANT_DTYPES = {"fp16": "float16", "f16": "float16", "bf16": "bfloat16", "fp32": "float32", "f32": "float32"}


def size_of(text: str) -> int:
    """Return 4096, 4k, 4K or 25.6k as a number, and -1 for "auto".

    Raises: ValueError when the text is no such number.
    """
    text = text.strip()
    match = SIZE.fullmatch(text)
    if match is None:
        size = -1 if text.lower() == "auto" else int(text)
    elif match[2].isupper():
        size = int(match[1]) * FACTORS[match[2]]
    elif len(match[1]) > MAX_DIGITS:
        raise ValueError(f"{match[1][:MAX_DIGITS]}... is beyond any size")
    else:
        size = int(float(match[1]) * FACTORS[match[2]])
    if abs(size) >= 10**MAX_DIGITS:
        raise ValueError("beyond any size")
    return size


def json_of(text: str, *, with_sizes: bool = False) -> Any:
    """Return a JSON value; with `with_sizes` bare numbers such as 80g are understood, as vLLM does for its own objects.

    Raises: ValueError when it is none.
    """
    if with_sizes:
        parts = JSON_TEXT.split(text)
        parts[::2] = [re.sub(rf"\b{SIZE.pattern}\b", lambda match: str(size_of(match[0])), part) for part in parts[::2]]
        text = "".join(parts)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def what_is_expected(option: LaunchOption, value: str) -> str:
    """Return what the parser expects instead of a value that it refuses; an empty text when it takes the value."""
    if "$" in value or (option.optional and value in ("", "None")):
        return ""
    try:
        match option.kind:
            case "int":
                value = str(int(value))
            case "float":
                float(value)
            case "size" | "size_or_auto":
                if size_of(value) == -1 and option.kind == "size" and value.strip().lower() == "auto":
                    return "a number"
            case "json":
                json_of(value)
            case "json_or_text":
                if re.fullmatch(r"\s*{.*}\s*", value, re.DOTALL):
                    json_of(value)
            case "object":
                return _keys_expected(option, json_of(value, with_sizes=True))
            case "folded":
                value = value.lower().replace("-", "_")
    except ValueError as error:
        kinds = {"int": "a whole number", "float": "a number", "size": "a number", "size_or_auto": 'a number or "auto"'}
        return kinds.get(option.kind, f"JSON ({error})")
    if option.choices and value not in option.choices:
        return f"one of {', '.join(option.choices)}"
    return ""


def _keys_expected(option: LaunchOption, value: Any) -> str:
    if not isinstance(value, dict):
        return "a JSON object"
    unknown = next((key for key in value if key not in option.keys), None)
    if unknown is None:
        return ""
    nearest = difflib.get_close_matches(unknown[:80], option.keys, n=1)
    return f'no key "{unknown}"' + (f", perhaps {nearest[0]}" if nearest else f", but {', '.join(option.keys)}")


def mended(option: LaunchOption, value: str, expected: str) -> str:
    """Return what to write instead of a refused value, as far as that can be told."""
    if option.names[0] == "--dtype" and value.lower() in MEANT_DTYPES:
        return f"use --dtype {MEANT_DTYPES[value.lower()]}"
    nearest = difflib.get_close_matches(value[:80], option.choices, n=1)
    if nearest:
        return f"did you mean {nearest[0]}?"
    return (
        "correct the value"
        if "json" in option.kind or option.kind == "object" or len(expected) > 80
        else f"use {expected}"
    )
