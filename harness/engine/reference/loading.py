"""Load a checkpoint by a strict contract: whatever does not match the config is refused with a named reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.checkpoint.manifest import Checkpoint, Defect, Tensor, read_checkpoint
from harness.checkpoint.survey import survey
from harness.engine.reference.config import shape_of, stored_dtype
from harness.engine.reference.defects import PlantedDefect
from harness.engine.reference.model import Floats, LlamaShape
from harness.engine.reference.tensor_source import TensorSource
from harness.engine.reference.tokenizer import Tokenizer
from harness.errors import CheckpointDefect

_NUMPY_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_CAST_BY_LENIENT = {"I8": "|i1", "U8": "|u1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
_ZERO_TAIL_BYTES = 1024
# Rows of these may be zero by right: unused ids of a padded vocabulary.
_PADDED_BY_VOCABULARY = frozenset({"model.embed_tokens.weight", "lm_head.weight"})


class Refusal(StrEnum):
    """Reasons beyond the structural ones of `harness.checkpoint.manifest.Defect`."""

    MISSING_TENSOR = "missing_tensor"
    UNEXPECTED_TENSOR = "unexpected_tensor"
    UNEXPECTED_SHAPE = "unexpected_shape"
    UNEXPECTED_DTYPE = "unexpected_dtype"
    TIED_EMBEDDING_SKEW = "tied_embedding_skew"
    NONFINITE_VALUES = "nonfinite_values"
    ZERO_TAIL = "zero_tail"


# Real vLLM 0.32 loads checkpoints with these; seen in its source and in measured runs.
_LENIENT_STRUCTURE = frozenset(
    {
        Defect.SHARD_NOT_IN_INDEX,
        Defect.TENSOR_NOT_IN_INDEX,
        Defect.TENSOR_IN_OTHER_SHARD,
        Defect.INDEX_NAMES_ABSENT_TENSOR,
        Defect.DUPLICATE_TENSOR,
        Defect.DUPLICATE_KEY,
        Defect.MIXED_SERIES,
        Defect.MIXED_WEIGHT_FAMILIES,
        Defect.NESTED_CHECKPOINT,
        Defect.PARTIAL_DOWNLOAD_FILE,
    }
)


@dataclass(frozen=True, slots=True)
class Contract:
    """What is refused; the strict contract has no planted defects."""

    defects: frozenset[PlantedDefect] = frozenset()

    @property
    def is_lenient(self) -> bool:
        """Say whether the contract follows real vLLM instead."""
        return PlantedDefect.LENIENT_LIKE_VLLM in self.defects

    def accepts(self, defect: PlantedDefect) -> bool:
        """Say whether this one wrong thing is let through."""
        return defect in self.defects or self.is_lenient


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Everything that serving needs."""

    shape: LlamaShape
    tensors: Mapping[str, Floats]
    tokenizer: Tokenizer
    end_ids: frozenset[int]
    dtype: str


def load(
    path: Path, *, dtype: str, max_model_len: int | None, source: TensorSource, contract: Contract = Contract()
) -> Loaded:
    """Load the checkpoint at `path`, its weights rounded to `dtype` and held as float32.

    Only the weights are rounded; activations stay float32 whatever the dtype.
    Raises: CheckpointDefect with the first rule broken.
    """
    checkpoint = _read_structure(path, contract)
    shape, end_ids = shape_of(checkpoint, max_model_len=max_model_len)
    tokenizer = Tokenizer.read(path, vocabulary=shape.vocabulary, allow_beyond=contract.is_lenient)
    chosen = _chosen(checkpoint.tensors)
    expected = shape.tensor_shapes()
    extras = _check_names(checkpoint, chosen, expected, shape, contract)
    _check_layout(checkpoint, chosen, expected, contract)
    target = stored_dtype(checkpoint) if dtype == "auto" else dtype
    tensors: dict[str, Floats] = {}
    for tensor, raw in source.tensors(checkpoint, chosen.values()):
        shard = checkpoint.path / tensor.shard
        if not contract.is_lenient:
            _check_zero_tail(tensor, raw, shard, is_last=_ends_shard(checkpoint, tensor))
        values = _round_to(_widen(raw, tensor).reshape(tensor.shape), target, stored=tensor.dtype)
        if not contract.accepts(PlantedDefect.IGNORES_NONFINITE) and not np.isfinite(values).all():
            count = int(values.size - np.isfinite(values).sum())
            what = f"{count:,} of {values.size:,} values are not finite as {target}"
            raise CheckpointDefect(Refusal.NONFINITE_VALUES, what, path=shard, tensor=tensor.name)
        tensors[tensor.name] = values
    for name in extras:
        extra = tensors.pop(name, None)
        if shape.is_tied and extra is not None:
            _check_tied(checkpoint, chosen[name], extra, tensors.get("model.embed_tokens.weight"), contract)
    for name, wanted in expected.items():
        tensors[name] = _fitted(tensors.get(name), wanted)
    return Loaded(shape=shape, tensors=tensors, tokenizer=tokenizer, end_ids=end_ids, dtype=target)


def _read_structure(path: Path, contract: Contract) -> Checkpoint:
    if not contract.is_lenient:
        return read_checkpoint(path)
    found, defects = survey(path)
    for defect in defects:
        if defect.reason not in _LENIENT_STRUCTURE:
            raise defect
    return found


def _chosen(tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return one tensor per name; the last wins (only the lenient contract lets repeated names get here)."""
    return {tensor.name: tensor for tensor in tensors}


def _check_names(
    checkpoint: Checkpoint,
    chosen: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    shape: LlamaShape,
    contract: Contract,
) -> tuple[str, ...]:
    """Return the names of tensors that are not part of the model but may be there."""
    for name in expected:
        # Real vLLM only insists on parameters that no packed layer serves: the norms.
        insists = not contract.is_lenient or name.endswith("norm.weight")
        if name not in chosen and insists and PlantedDefect.IGNORES_MISSING_TENSOR not in contract.defects:
            what = f"the config asks for it with shape {list(expected[name])}, no shard holds it"
            raise CheckpointDefect(Refusal.MISSING_TENSOR, what, path=checkpoint.path, tensor=name)
    extras = tuple(name for name in chosen if name not in expected)
    for name in extras:
        if shape.is_tied and name == "lm_head.weight":
            continue
        if "rotary_emb.inv_freq" in name and contract.is_lenient:
            continue
        what = f"the config ({shape.layers} layers) has no place for it"
        where = checkpoint.path / chosen[name].shard
        raise CheckpointDefect(Refusal.UNEXPECTED_TENSOR, what, path=where, tensor=name)
    return extras


def _check_layout(
    checkpoint: Checkpoint,
    chosen: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    contract: Contract,
) -> None:
    config_dtype = stored_dtype(checkpoint)
    for name, tensor in chosen.items():
        where = checkpoint.path / tensor.shard
        wanted = expected.get(name, tensor.shape)
        if tensor.shape != wanted and not _shape_is_accepted(tensor.shape, wanted, contract):
            what = f"expected {list(wanted)} by the config, got {list(tensor.shape)}"
            raise CheckpointDefect(Refusal.UNEXPECTED_SHAPE, what, path=where, tensor=name)
        if contract.is_lenient and tensor.dtype in (_CAST_BY_LENIENT.keys() | _NUMPY_DTYPES.keys() | {"BF16"}):
            continue
        if _float_name(tensor.dtype) != config_dtype:
            what = f"expected {config_dtype} by the config, got {tensor.dtype}"
            raise CheckpointDefect(Refusal.UNEXPECTED_DTYPE, what, path=where, tensor=name)


def _shape_is_accepted(shape: tuple[int, ...], wanted: tuple[int, ...], contract: Contract) -> bool:
    if PlantedDefect.IGNORES_SHAPE in contract.defects:
        return True
    # A tensor larger than its place is cut in the dimension that tensor parallelism would split.
    is_matrix = len(shape) == len(wanted) == 2
    return contract.is_lenient and is_matrix and all(have >= want for have, want in zip(shape, wanted, strict=True))


def _float_name(dtype: str) -> str | None:
    return {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}.get(dtype)


def _ends_shard(checkpoint: Checkpoint, tensor: Tensor) -> bool:
    shard = next(shard for shard in checkpoint.shards if shard.name == tensor.shard)
    return shard.tensors[-1] == tensor


def _check_zero_tail(tensor: Tensor, raw: bytes, shard: Path, *, is_last: bool) -> None:
    """Refuse a tensor that is all zero, or that ends a shard in zeros: a file preallocated and not fully written."""
    zeros = len(raw) - len(raw.rstrip(b"\0"))
    is_padding = tensor.name in _PADDED_BY_VOCABULARY
    if raw and (zeros == len(raw) or (is_last and not is_padding and zeros >= _ZERO_TAIL_BYTES)):
        what = f"the last {zeros:,} of its {len(raw):,} bytes are zero (preallocated, never written?)"
        raise CheckpointDefect(Refusal.ZERO_TAIL, what, path=shard, tensor=tensor.name)


def _check_tied(
    checkpoint: Checkpoint, tensor: Tensor, head: Floats, embedding: Floats | None, contract: Contract
) -> None:
    if not contract.is_lenient and (embedding is None or not np.array_equal(head, embedding)):
        what = '"tie_word_embeddings" is true, but it differs from "model.embed_tokens.weight"'
        where = checkpoint.path / tensor.shard
        raise CheckpointDefect(Refusal.TIED_EMBEDDING_SKEW, what, path=where, tensor=tensor.name)


def _widen(raw: bytes, tensor: Tensor) -> Floats:
    if tensor.dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    stored: NDArray[np.generic] = np.frombuffer(raw, {**_NUMPY_DTYPES, **_CAST_BY_LENIENT}[tensor.dtype])
    with np.errstate(over="ignore"):
        return stored.astype(np.float32)


def _round_to(values: Floats, dtype: str, *, stored: str) -> Floats:
    """Round float32 values to the nearest value of `dtype`, ties to even, and return them as float32."""
    if dtype == "float16" and stored != "F16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16" and stored != "BF16":
        bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
        return np.where(np.isnan(values), values, rounded.astype(np.uint32).view(np.float32))
    return values


def _fitted(values: Floats | None, wanted: tuple[int, ...]) -> Floats:
    """Return the tensor with the wanted shape; a contract that let another shape through gets it cut and padded."""
    if values is not None and values.shape == wanted:
        return values
    fitted = np.zeros(wanted, np.float32)
    if values is not None:
        folded = values.reshape(-1, values.shape[-1] if values.ndim else 1) if len(wanted) == 2 else values.reshape(-1)
        common = tuple(slice(0, min(have, want)) for have, want in zip(folded.shape, wanted, strict=True))
        fitted[common] = folded[common]
    return fitted
