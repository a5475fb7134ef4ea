"""Config, tokenizer, chat template and generation defaults that are cut, absent, or of another release.

Source: taxonomy rows C09, C10, C11, C12.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from harness.errors import FaultNotApplicable, ScenarioInvalid
from harness.faults.facts import CONFIG_NAME, digest_of, file_facts, read_json
from harness.faults.fault import Injected, parameters_of
from harness.faults.target import Target

TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
TEMPLATE_NAME = "chat_template.jinja"
GENERATION_NAME = "generation_config.json"
EMBEDDING = "*embed_tokens.weight"
OTHER_TEMPLATE = (
    "{% for message in messages %}### {{ message.role }}:\n{{ message.content }}\n\n{% endfor %}### assistant:\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CutJson:
    """A small file that ends early."""

    name: ClassVar[str] = "cut_json"
    fault_id: ClassVar[str] = "C12"
    file: str
    keep_ratio: float

    def __post_init__(self) -> None:
        if not 0 <= self.keep_ratio < 1:
            raise ScenarioInvalid(f"cut_json: keep_ratio={self.keep_ratio:g}, expected 0 to below 1")

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        if not _is_json(own.own(self.file)):
            raise FaultNotApplicable(f'"{target / self.file}" is no JSON already')
        before = file_facts(target / self.file) or {}
        own.truncate(self.file, int(before["size_bytes"] * self.keep_ratio))
        after = file_facts(target / self.file) or {}
        is_json = _is_json(target / self.file)
        return Injected.of(
            self,
            proved=not is_json and 0 <= after.get("size_bytes", -1) < before["size_bytes"],
            because=f'"{self.file}" had {before["size_bytes"]:,} bytes, has {after.get("size_bytes", 0):,}, and is '
            f"{'still JSON' if is_json else 'no JSON'}",
            before={"file": self.file, **before},
            after={**after, "is_json": is_json},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingFile:
    """A small file that is not there."""

    name: ClassVar[str] = "missing_file"
    fault_id: ClassVar[str] = "C12"
    file: str

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        if self.file in own.weight_files():
            raise FaultNotApplicable(f'"{self.file}" is a weight file, which is missing_shard')
        own.own(self.file)
        before = file_facts(target / self.file) or {}
        own.remove(self.file)
        is_there = (target / self.file).exists()
        return Injected.of(
            self,
            proved=not is_there,
            because=f'"{self.file}" ({before["size_bytes"]:,} bytes) is {"still there" if is_there else "absent"}',
            before={"file": self.file, **before},
            after={"exists": is_there},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBeyondRows:
    """A tokenizer of a release with a larger vocabulary: a common token has an id that the embedding has no row for."""

    name: ClassVar[str] = "token_beyond_rows"
    fault_id: ClassVar[str] = "C09"
    token: str

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        rows = own.find(EMBEDDING).shape[0]
        before = _vocabulary(target)
        if self.token not in before:
            raise FaultNotApplicable(f'"{self.token}" is no token of "{target / TOKENIZER_NAME}"')
        wanted = {**before, self.token: max(rows, max(before.values()) + 1)}
        own.write(TOKENIZER_NAME, _with_vocabulary(target, wanted))
        after = _vocabulary(target)
        seen = after.get(self.token)
        return Injected.of(
            self,
            proved=after == wanted and after != before and (seen or 0) >= rows,
            because=f'token "{self.token}" had id {before[self.token]}, has {seen}; the embedding has {rows} rows',
            before={"id": before[self.token], "rows": rows},
            after={"id": seen, "digest": digest_of(after)},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PermutedTokenizer:
    """A tokenizer of another release: every id is in range, and nearly every one is another token's."""

    name: ClassVar[str] = "permuted_tokenizer"
    fault_id: ClassVar[str] = "C09"

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        before = _vocabulary(target)
        special = {token["content"] for token in read_json(target / TOKENIZER_NAME).get("added_tokens", ())}
        tokens = sorted(token for token in before if token not in special)
        if len(tokens) < 2:
            raise FaultNotApplicable(f'"{target / TOKENIZER_NAME}" has {len(tokens)} tokens, expected at least 2')
        shift = random.randrange(1, len(tokens))
        ids = [before[token] for token in tokens]
        wanted = before | dict(zip(tokens, ids[shift:] + ids[:shift], strict=True))
        own.write(TOKENIZER_NAME, _with_vocabulary(target, wanted))
        after = _vocabulary(target)
        moved = sum(after.get(token) != number for token, number in before.items())
        return Injected.of(
            self,
            proved=after == wanted and sorted(after.values()) == sorted(before.values()) and moved > 0,
            because=f"{moved} of {len(before)} tokens have another id; the ids are "
            f"{'the same' if sorted(after.values()) == sorted(before.values()) else 'others'}",
            before={"tokens": len(before), "digest": digest_of(before)},
            after={"moved": moved, "digest": digest_of(after)},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedChatTemplate:
    """Another chat template than the model was trained with."""

    name: ClassVar[str] = "changed_chat_template"
    fault_id: ClassVar[str] = "C10"
    template: str

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        before = _template(target)
        own.write(TEMPLATE_NAME, self.template.encode())
        after = _template(target)
        return Injected.of(
            self,
            proved=after == self.template and after != before,
            because=f"the chat template was {_shown(before)}, is {_shown(after)}",
            before={"template": _shown(before)},
            after={"template": _shown(after)},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingChatTemplate:
    """No chat template anywhere: chats are refused."""

    name: ClassVar[str] = "missing_chat_template"
    fault_id: ClassVar[str] = "C10"

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        before = _template(target)
        if before is None:
            raise FaultNotApplicable(f'"{target}" has no chat template already')
        if (target / TEMPLATE_NAME).exists():
            own.remove(TEMPLATE_NAME)
        settings = read_json(target / TOKENIZER_CONFIG_NAME) if (target / TOKENIZER_CONFIG_NAME).exists() else {}
        if settings.pop("chat_template", None) is not None:
            own.write(TOKENIZER_CONFIG_NAME, _json(settings))
        after = _template(target)
        return Injected.of(
            self,
            proved=after is None,
            because=f"the chat template was {_shown(before)}, is {_shown(after)}",
            before={"template": _shown(before)},
            after={"template": _shown(after)},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling defaults that came with the checkpoint: requests that name none are answered otherwise."""

    name: ClassVar[str] = "generation_defaults"
    fault_id: ClassVar[str] = "C11"
    changes: tuple[tuple[str, Any], ...]

    def __post_init__(self) -> None:
        if not self.changes:
            raise ScenarioInvalid("generation_defaults: changes is empty, expected at least one key")

    def parameters(self) -> Mapping[str, Any]:
        return {"changes": dict(self.changes)}

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        there = (target / GENERATION_NAME).exists()
        before = read_json(target / GENERATION_NAME) if there else {}
        wanted = before | dict(self.changes)
        if wanted == before:
            raise FaultNotApplicable(f'"{target / GENERATION_NAME}" has these values already')
        own.write(GENERATION_NAME, _json(wanted))
        after = read_json(target / GENERATION_NAME) if (target / GENERATION_NAME).exists() else {}
        return Injected.of(
            self,
            proved=after == wanted,
            because="; ".join(
                f'generation default "{key}" was {before.get(key)!r}, is {after.get(key)!r}' for key, _ in self.changes
            ),
            before={key: before.get(key) for key, _ in self.changes},
            after={key: after.get(key) for key, _ in self.changes},
        )


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _vocabulary(path: Path) -> dict[str, int]:
    model = read_json(path / TOKENIZER_NAME).get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict) or not vocabulary or not all(isinstance(v, int) for v in vocabulary.values()):
        raise FaultNotApplicable(f'"{path / TOKENIZER_NAME}" has no vocabulary of tokens and ids (BPE or WordPiece)')
    return vocabulary


def _with_vocabulary(path: Path, vocabulary: Mapping[str, int]) -> bytes:
    tokenizer = read_json(path / TOKENIZER_NAME)
    tokenizer["model"]["vocab"] = dict(vocabulary)
    return _json(tokenizer)


def _template(path: Path) -> str | None:
    """Return the template that an engine takes: the file of its own before the tokenizer's config."""
    if (path / TEMPLATE_NAME).exists():
        return (path / TEMPLATE_NAME).read_text(encoding="utf-8")
    if not (path / TOKENIZER_CONFIG_NAME).exists():
        return None
    template = read_json(path / TOKENIZER_CONFIG_NAME).get("chat_template")
    return template if template is None or isinstance(template, str) else json.dumps(template)


def _shown(template: str | None) -> str:
    return "absent" if template is None else f"{len(template)} characters ({digest_of(template)[:8]})"


def cut_json(file: str = CONFIG_NAME, *, keep_ratio: float = 0.5) -> CutJson:
    """Keep only the first part of a JSON file: config, weight index, tokenizer. Source: taxonomy row C12."""
    return CutJson(file=file, keep_ratio=keep_ratio)


def missing_file(file: str = TOKENIZER_NAME) -> MissingFile:
    """Remove a file that holds no weights: config, weight index, tokenizer. Source: taxonomy rows C12, D19."""
    return MissingFile(file=file)


def token_beyond_rows(*, token: str = "e") -> TokenBeyondRows:  # noqa: S107 - a token of a text
    """Give a common token an id beyond the embedding, as a tokenizer that grew does. Source: taxonomy row C09."""
    return TokenBeyondRows(token=token)


def permuted_tokenizer() -> PermutedTokenizer:
    """Give every token that is not special another one's id; all stay in range. Source: taxonomy row C09."""
    return PermutedTokenizer()


def changed_chat_template(*, template: str = OTHER_TEMPLATE) -> ChangedChatTemplate:
    """Put another chat template beside the weights. Source: taxonomy row C10."""
    return ChangedChatTemplate(template=template)


def missing_chat_template() -> MissingChatTemplate:
    """Take the chat template away. Source: taxonomy row C10."""
    return MissingChatTemplate()


def generation_defaults(*, changes: Mapping[str, Any] | None = None) -> GenerationDefaults:
    """Change sampling defaults; by default a temperature of 1.9 and a top_k of 3. Source: taxonomy row C11."""
    return GenerationDefaults(changes=tuple((changes or {"temperature": 1.9, "top_k": 3}).items()))
