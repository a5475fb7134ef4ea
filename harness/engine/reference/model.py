"""The Llama forward pass in NumPy, in float32, with a KV cache.

Source: RMSNorm, rotary embedding by halves, grouped-query attention and SwiGLU as the Llama checkpoints on disk expect
them (q and k rows in half-rotation order).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Every number of a Llama config that the forward pass depends on."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_positions: int
    norm_epsilon: float
    rope_theta: float
    is_tied: bool

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of every tensor that a checkpoint of this config holds."""
        q_rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            shapes[prefix + "input_layernorm.weight"] = (self.hidden,)
            shapes[prefix + "self_attn.q_proj.weight"] = (q_rows, self.hidden)
            shapes[prefix + "self_attn.k_proj.weight"] = (kv_rows, self.hidden)
            shapes[prefix + "self_attn.v_proj.weight"] = (kv_rows, self.hidden)
            shapes[prefix + "self_attn.o_proj.weight"] = (self.hidden, q_rows)
            shapes[prefix + "post_attention_layernorm.weight"] = (self.hidden,)
            shapes[prefix + "mlp.gate_proj.weight"] = (self.intermediate, self.hidden)
            shapes[prefix + "mlp.up_proj.weight"] = (self.intermediate, self.hidden)
            shapes[prefix + "mlp.down_proj.weight"] = (self.hidden, self.intermediate)
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.is_tied:
            shapes["lm_head.weight"] = (self.vocabulary, self.hidden)
        return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One block; matrices are stored as (inputs, outputs), with projections of the same input side by side."""

    input_norm: Floats
    attention_in: Floats  # q, k and v
    attention_out: Floats
    mlp_norm: Floats
    mlp_in: Floats  # gate and up
    mlp_out: Floats


class KvCache:
    """Keys and values of the tokens seen so far: one (kv_heads, capacity, head_dim) array per layer."""

    def __init__(self, shape: LlamaShape, *, capacity_tokens: int) -> None:
        size = (shape.layers, shape.kv_heads, capacity_tokens, shape.head_dim)
        self.keys = np.zeros(size, np.float32)
        self.values = np.zeros(size, np.float32)
        self.length_tokens = 0


class Llama:
    """A loaded model; `forward` may be called for many caches, one call at a time."""

    def __init__(self, shape: LlamaShape, tensors: Mapping[str, Floats], *, rounded: bool = False) -> None:
        """Take the tensors named by `shape.tensor_shapes()`, as float32; with `rounded` compute as if in bfloat16."""
        self.shape = shape
        self._kept = rounded_to_bfloat16 if rounded else _as_it_is
        self._embedding = tensors["model.embed_tokens.weight"]
        self._layers = tuple(_layer(tensors, f"model.layers.{layer}.") for layer in range(shape.layers))
        self._norm = tensors["model.norm.weight"]
        self._head = (self._embedding if shape.is_tied else tensors["lm_head.weight"]).T
        self._scale = np.float32(shape.head_dim**-0.5)
        halves = np.arange(0, shape.head_dim, 2, dtype=np.float32) / shape.head_dim
        frequencies = (1.0 / np.float32(shape.rope_theta) ** halves).astype(np.float32)
        angles = np.outer(np.arange(shape.max_positions, dtype=np.float32), frequencies)
        self._cosines, self._sines = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]

    def new_cache(self, capacity_tokens: int) -> KvCache:
        """Return an empty cache for a sequence of at most `capacity_tokens`."""
        return KvCache(self.shape, capacity_tokens=capacity_tokens)

    def forward(self, tokens: Sequence[int], cache: KvCache, *, last_only: bool = False) -> Floats:
        """Append `tokens` to the sequence in `cache` and return their logits, (tokens, vocabulary).

        With `last_only` the logits of the last token alone are computed, (1, vocabulary).
        Raises: IndexError for a token id beyond the embedding.
        """
        kept = self._kept  # where an engine writes a result to memory, in the type it serves in
        hidden = kept(self._embedding[np.asarray(tokens, np.int64)])
        first, last = cache.length_tokens, cache.length_tokens + len(tokens)
        cosines, sines = self._cosines[first:last], self._sines[first:last]
        mask = None
        if len(tokens) > 1:
            positions = np.arange(last)
            mask = positions[None, :] > np.arange(first, last)[:, None]
        for number, layer in enumerate(self._layers):
            normed = kept(_rms_norm(hidden, layer.input_norm, self.shape.norm_epsilon))
            projected = kept(normed @ layer.attention_in)
            attended = kept(self._attend(projected, cache, number, first, last, cosines, sines, mask))
            hidden = kept(hidden + kept(attended @ layer.attention_out))
            normed = kept(_rms_norm(hidden, layer.mlp_norm, self.shape.norm_epsilon))
            gate, up = np.split(kept(normed @ layer.mlp_in), 2, axis=-1)
            hidden = kept(hidden + kept(kept(_silu(gate) * up) @ layer.mlp_out))
        cache.length_tokens = last
        if last_only:
            hidden = hidden[-1:]
        return kept(kept(_rms_norm(hidden, self._norm, self.shape.norm_epsilon)) @ self._head)

    def _attend(
        self,
        projected: Floats,
        cache: KvCache,
        layer: int,
        first: int,
        last: int,
        cosines: Floats,
        sines: Floats,
        mask: NDArray[np.bool_] | None,
    ) -> Floats:
        shape, count = self.shape, last - first
        heads = projected.reshape(count, shape.heads + 2 * shape.kv_heads, shape.head_dim)
        rotated = self._kept(_rotate(heads[:, : shape.heads + shape.kv_heads], cosines, sines))
        keys, values = cache.keys[layer], cache.values[layer]
        keys[:, first:last] = rotated[:, shape.heads :].swapaxes(0, 1)
        values[:, first:last] = heads[:, shape.heads + shape.kv_heads :].swapaxes(0, 1)
        # Query heads that share a key head stand next to each other: (kv_heads, group, tokens, head_dim).
        group = shape.heads // shape.kv_heads
        queries = rotated[:, : shape.heads].swapaxes(0, 1).reshape(shape.kv_heads, group, count, shape.head_dim)
        scores = (queries @ keys[:, None, :last].swapaxes(-1, -2)) * self._scale
        if mask is not None:
            scores = np.where(mask, np.float32(-np.inf), scores)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed = scores @ values[:, None, :last]
        joined: Floats = mixed.reshape(shape.heads, count, shape.head_dim).swapaxes(0, 1).reshape(count, -1)
        return joined


def log_softmax(logits: Floats) -> Floats:
    """Return the natural logarithm of the probabilities along the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def _layer(tensors: Mapping[str, Floats], prefix: str) -> _Layer:
    def side_by_side(*names: str) -> Floats:
        joined = np.concatenate([tensors[f"{prefix}{name}.weight"] for name in names])
        return np.ascontiguousarray(joined.T)

    return _Layer(
        input_norm=tensors[prefix + "input_layernorm.weight"],
        attention_in=side_by_side("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        attention_out=side_by_side("self_attn.o_proj"),
        mlp_norm=tensors[prefix + "post_attention_layernorm.weight"],
        mlp_in=side_by_side("mlp.gate_proj", "mlp.up_proj"),
        mlp_out=side_by_side("mlp.down_proj"),
    )


def _rms_norm(hidden: Floats, weight: Floats, epsilon: float) -> Floats:
    mean_square = np.einsum("ij,ij->i", hidden, hidden)[:, None] / np.float32(hidden.shape[-1])
    result: Floats = hidden / np.sqrt(mean_square + np.float32(epsilon)) * weight
    return result


def _rotate(heads: Floats, cosines: Floats, sines: Floats) -> Floats:
    half = heads.shape[-1] // 2
    low, high = heads[..., :half], heads[..., half:]
    rotated: Floats = np.concatenate((low * cosines - high * sines, high * cosines + low * sines), axis=-1)
    return rotated


def _silu(values: Floats) -> Floats:
    # exp overflows to infinity for very negative values, which gives the right answer, 0.
    return (values / (1.0 + np.exp(-values))).astype(np.float32, copy=False)


def _as_it_is(values: Floats) -> Floats:
    return values


def rounded_to_bfloat16(values: Floats) -> Floats:
    """Return the nearest values that bfloat16 can hold, ties to even; infinities stay what they are."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return nearest.view(np.float32)
