"""The forward pass against itself, and against a slow one written another way."""

from __future__ import annotations

import numpy as np
import pytest
from reference_checkpoints import HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY, weights

from harness.engine.reference.model import Floats, Llama, LlamaShape, log_softmax, rounded_to_bfloat16

TOKENS = [5, 300, 17, 17, 511, 0, 42, 8]


def shape(*, heads: int = 4, kv_heads: int = 2, is_tied: bool = False) -> LlamaShape:
    return LlamaShape(
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        layers=LAYERS,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=32,
        vocabulary=VOCABULARY,
        max_positions=64,
        norm_epsilon=1e-5,
        rope_theta=10000.0,
        is_tied=is_tied,
    )


def slow_logits(shape: LlamaShape, tensors: dict[str, Floats], tokens: list[int]) -> np.ndarray:
    """Compute the logits position by position and head by head, in float64, with complex rotations."""
    wide = {name: values.astype(np.float64) for name, values in tensors.items()}
    half = shape.head_dim // 2
    turns = np.exp(1j * np.outer(np.arange(len(tokens)), shape.rope_theta ** (-np.arange(half) / half)))

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + shape.norm_epsilon) * wide[name + ".weight"]

    def turned(x: np.ndarray) -> np.ndarray:
        rotated = (x[:, :half] + 1j * x[:, half:]) * turns
        return np.concatenate((rotated.real, rotated.imag), axis=-1)

    hidden = wide["model.embed_tokens.weight"][tokens]
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        x = norm(hidden, prefix + "input_layernorm")
        q, k, v = (x @ wide[f"{prefix}self_attn.{name}_proj.weight"].T for name in "qkv")
        mixed = np.zeros_like(q)
        for head in range(shape.heads):
            shared = head // (shape.heads // shape.kv_heads)
            here = slice(head * shape.head_dim, (head + 1) * shape.head_dim)
            there = slice(shared * shape.head_dim, (shared + 1) * shape.head_dim)
            query, key, value = turned(q[:, here]), turned(k[:, there]), v[:, there]
            for position in range(len(tokens)):
                scores = key[: position + 1] @ query[position] / np.sqrt(shape.head_dim)
                chances = np.exp(scores - scores.max())
                mixed[position, here] = chances @ value[: position + 1] / chances.sum()
        hidden = hidden + mixed @ wide[prefix + "self_attn.o_proj.weight"].T
        x = norm(hidden, prefix + "post_attention_layernorm")
        gate, up = (x @ wide[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ wide[prefix + "mlp.down_proj.weight"].T
    head_name = "model.embed_tokens.weight" if shape.is_tied else "lm_head.weight"
    return norm(hidden, "model.norm") @ wide[head_name].T


@pytest.mark.parametrize("is_tied", [False, True])
def test_logits_equal_those_of_a_slow_forward_pass(is_tied: bool) -> None:
    tensors, wanted = weights(1, tied=is_tied), shape(is_tied=is_tied)
    model = Llama(wanted, tensors)
    logits = model.forward(TOKENS, model.new_cache(len(TOKENS)))
    np.testing.assert_allclose(logits, slow_logits(wanted, tensors, TOKENS), atol=2e-5)


@pytest.mark.parametrize("split", [1, 3, 7])
def test_logits_are_the_same_with_and_without_cached_keys(split: int) -> None:
    model = Llama(shape(), weights(1))
    whole = model.forward(TOKENS, model.new_cache(len(TOKENS)))
    cache = model.new_cache(len(TOKENS))
    rows = [model.forward(TOKENS[:split], cache)]
    rows += [model.forward([token], cache) for token in TOKENS[split:]]
    np.testing.assert_allclose(np.concatenate(rows), whole, atol=1e-5)


def test_last_only_gives_the_last_row() -> None:
    model = Llama(shape(), weights(1))
    whole = model.forward(TOKENS, model.new_cache(len(TOKENS)))
    last = model.forward(TOKENS, model.new_cache(len(TOKENS)), last_only=True)
    assert last.shape == (1, VOCABULARY)
    np.testing.assert_allclose(last, whole[-1:], atol=1e-5)


def test_a_later_token_does_not_change_earlier_logits() -> None:
    model = Llama(shape(), weights(1))
    one = model.forward([*TOKENS, 7], model.new_cache(9))
    other = model.forward([*TOKENS, 8], model.new_cache(9))
    np.testing.assert_array_equal(one[:-1], other[:-1])
    assert not np.allclose(one[-1], other[-1])


def test_an_id_beyond_the_embedding_is_an_error() -> None:
    model = Llama(shape(), weights(1))
    with pytest.raises(IndexError):
        model.forward([VOCABULARY], model.new_cache(1))


def test_log_softmax_sums_to_one() -> None:
    rows = log_softmax(np.array([[1.0, 2.0, 3.0], [1000.0, 0.0, -1000.0]], np.float32))
    np.testing.assert_allclose(np.exp(rows).sum(axis=-1), 1.0, rtol=1e-6)
    assert rows[1, 0] == 0.0


def test_rounded_pass_holds_only_what_bfloat16_can_hold_and_stays_near_the_other() -> None:
    tensors = weights(seed=1)
    plain, rounded = (Llama(shape(), tensors, rounded=r) for r in (False, True))
    logits = [model.forward(TOKENS, model.new_cache(len(TOKENS))) for model in (plain, rounded)]
    assert not (logits[1].view(np.uint32) & np.uint32(0xFFFF)).any()
    assert (logits[0].view(np.uint32) & np.uint32(0xFFFF)).any()
    difference = np.abs(log_softmax(logits[0]) - log_softmax(logits[1])).mean()
    assert 1e-4 < difference < 0.1


@pytest.mark.parametrize(
    ("value", "nearest"),
    [
        (1.0, 1.0),
        (1.0 + 2**-8, 1.0),  # half way: to the even one
        (1.0 + 3 * 2**-8, 1.0 + 2**-6),
        (1.0 + 2**-8 + 2**-20, 1.0 + 2**-7),
        (-1.0 - 2**-9, -1.0),
        (0.0, 0.0),
        (np.inf, np.inf),
        (-np.inf, -np.inf),
    ],
)
def test_rounding_is_to_the_nearest_value_of_bfloat16(value: float, nearest: float) -> None:
    assert rounded_to_bfloat16(np.array([value], np.float32))[0] == nearest
