"""One or more uses of every damage, on a small pair of checkpoints; shared by the tests of what holds for all."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness import faults
from harness.checkpoint import models
from harness.checkpoint.copy import private_copy
from harness.faults import Damage

DOWN = "model.layers.1.mlp.down_proj.weight"
UP = "model.layers.1.mlp.up_proj.weight"
SQUARE = "model.layers.0.self_attn.o_proj.weight"
OTHER_SQUARE = "model.layers.1.self_attn.o_proj.weight"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"

DAMAGES: dict[str, Damage] = {
    "widen_columns": faults.widen_tensor(DOWN, dim=1, by=8),
    "widen_rows_at_end": faults.widen_tensor("*.layers.1.mlp.gate_proj.weight", dim=0, by=3, at="end"),
    "narrow": faults.narrow_tensor(DOWN, dim=1, by=5),
    "transpose": faults.transpose_tensor(SQUARE),
    "relayout": faults.relayout_tensor(DOWN),
    "relayout_square": faults.relayout_tensor(SQUARE),
    "relayout_vector": faults.relayout_tensor("model.norm.weight"),
    "drop": faults.drop_tensor(DOWN),
    "drop_fused_part": faults.drop_tensor("*.layers.0.self_attn.k_proj.weight"),
    "wider_weights": faults.wider_weights(),
    "flip_all": faults.flip_dtype_in_header(dtype="F16"),
    "flip_one": faults.flip_dtype_in_header(dtype="I16", tensor=DOWN),
    "cast_one_f16": faults.cast_tensor(DOWN, dtype="F16"),
    "cast_one_f32": faults.cast_tensor(DOWN, dtype="F32"),
    "cast_one_i8": faults.cast_tensor(DOWN, dtype="I8"),
    "cast_all_f16": faults.cast_all(dtype="F16"),
    "cast_all_f32": faults.cast_all(dtype="F32"),
    "cast_all_i8": faults.cast_all(dtype="I8"),
    "beyond_fp16": faults.beyond_fp16_range(UP),
    "beyond_fp16_compensated": faults.beyond_fp16_range(UP, inverse=DOWN),
    "missing_shard": faults.missing_shard(),
    "truncate_half": faults.truncate_shard(),
    "truncate_byte": faults.truncate_shard(0, cut_bytes=1),
    "zero_tail": faults.zero_tail(),
    "pointer_file": faults.pointer_file(),
    "new_config_old_weights": faults.new_config_old_weights(),
    "old_config_new_weights": faults.old_config_new_weights(),
    "stale_index": faults.stale_index(),
    "config_intermediate": faults.mismatched_config(changes={"intermediate_size": 48}),
    "config_rope": faults.mismatched_config(changes={"rope_theta": 500.0}),
    "config_architecture": faults.mismatched_config(changes={"architectures": ["NeverReleasedForCausalLM"]}),
    "config_quantised": faults.added_config(changes={"quantization_config": {"quant_method": "fp8"}}),
    "config_custom_code": faults.added_config(changes={"auto_map": {"AutoConfig": "own.OwnConfig"}}),
    "config_key_removed": faults.removed_config("head_dim"),
    "extend_byte": faults.extend_shard(),
    "extend_page": faults.extend_shard(0, by=4096),
    "damage_header": faults.damage_header(),
    "html_file": faults.foreign_file(),
    "empty_file": faults.foreign_file(0, content="empty"),
    "zero_file": faults.foreign_file(content="zeros"),
    "zip_file": faults.foreign_file(content="zip"),
    "flip_bit": faults.flip_bit(DOWN),
    "flip_lowest_bit": faults.flip_bit(DOWN, element=3, bit=0),
    "nan": faults.nonfinite_values(DOWN),
    "inf": faults.nonfinite_values("model.norm.weight", count=5, value="-inf"),
    "swap": faults.swap_tensors(SQUARE, OTHER_SQUARE),
    "previous_shard": faults.previous_shard("model-00001-of-00002.safetensors"),
    "dangling_link": faults.unreadable_file(),
    "rename": faults.rename_tensor(DOWN),
    "rename_to": faults.rename_tensor(DOWN, to="model.layers.1.mlp.w2.weight"),
    "rename_prefix": faults.rename_prefix(),
    "add_bias": faults.add_bias("model.layers.0.self_attn.q_proj.weight"),
    "leftover_shards": faults.leftover_shards(),
    "leftover_consolidated": faults.leftover_consolidated(),
    "new_weights_as_bin": faults.new_weights_as_bin(),
    "stale_numpy_cache": faults.stale_numpy_cache(),
    "nested_checkpoint": faults.nested_checkpoint(),
    "ref_without_weights": faults.broken_hub_cache(),
    "incomplete_blob": faults.broken_hub_cache(state="incomplete_blob"),
    "presharded_state": faults.presharded_state(),
    "cut_config": faults.cut_json(),
    "cut_index": faults.cut_json("model.safetensors.index.json", keep_ratio=0.9),
    "cut_tokenizer": faults.cut_json("tokenizer.json"),
    "missing_tokenizer": faults.missing_file(),
    "missing_config": faults.missing_file("config.json"),
    "token_beyond_rows": faults.token_beyond_rows(),
    "permuted_tokenizer": faults.permuted_tokenizer(),
    "changed_chat_template": faults.changed_chat_template(),
    "missing_chat_template": faults.missing_chat_template(),
    "generation_defaults": faults.generation_defaults(),
}

# What the safetensors library says to the files afterwards: the damages that no reader of one file can see.
SILENT_FOR_THE_LIBRARY = set(DAMAGES) - {
    "missing_shard",
    "truncate_half",
    "truncate_byte",
    "pointer_file",
    "extend_byte",
    "extend_page",
    "damage_header",
    "html_file",
    "empty_file",
    "zero_file",
    "zip_file",
    "dangling_link",
    "stale_numpy_cache",  # no safetensors file is left at the top
    "ref_without_weights",
    "incomplete_blob",
}


@dataclass(frozen=True)
class Pair:
    """An old and a new checkpoint, which nobody may change, and private copies of the new one."""

    old: Path
    new: Path
    alike: Path | None = None  # another old one, whose config is the new one's

    def old_for(self, damage: Damage) -> Path:
        """Return the old checkpoint that this damage can be made with."""
        return self.alike if damage.name == "previous_shard" and self.alike else self.old

    @contextmanager
    def copy(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as directory:
            yield templated_copy(self.new, Path(directory) / "target")


def small(seed: int, *, shards: int = 2, intermediate: int = 64) -> models.ModelSource:
    """Return a checkpoint of about 100 KB."""
    return models.tiny_llama(
        seed, shards=shards, hidden=32, heads=2, kv_heads=1, intermediate=intermediate, vocabulary=300
    )


def templated_copy(source: Path, target: Path) -> Path:
    """Copy a checkpoint and give it a chat template, in both places where one may be."""
    private_copy(source, target)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    settings = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return target


def tree(path: Path) -> dict[str, tuple[int, int, int, str]]:
    """Return inode, mtime, links and digest of every file below a directory."""
    found = {}
    for file in sorted(path.rglob("*")):
        state = file.lstat()
        content = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
        found[str(file.relative_to(path))] = (state.st_ino, state.st_mtime_ns, state.st_nlink, content)
    return found


def seen(path: Path) -> dict[str, tuple[int, int, int, str]]:
    """Return what must never change of the user's files: inode, size, mtime, digest. Links may be added and removed."""
    return {
        str(file.relative_to(path)): (state.st_ino, state.st_mode, state.st_mtime_ns, digest)
        for file in sorted(path.rglob("*"))
        for state, digest in [(file.lstat(), hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "")]
    }


def contents(path: Path) -> dict[str, str]:
    """Return the digest of every file below a directory."""
    return {name: digest for name, (_, _, _, digest) in tree(path).items()}
