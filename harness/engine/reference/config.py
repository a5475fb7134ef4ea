"""Read what the forward pass needs from a Llama config, and refuse what it does not implement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from harness.checkpoint.manifest import Checkpoint
from harness.engine.reference.model import LlamaShape
from harness.errors import CheckpointDefect

CONFIG_INVALID = "config_invalid"
CONFIG_UNSUPPORTED = "config_unsupported"

_LARGEST_SIZE = 2**31
_FLOAT_DTYPES = ("bfloat16", "float16", "float32")


def shape_of(checkpoint: Checkpoint, *, max_model_len: int | None) -> tuple[LlamaShape, frozenset[int]]:
    """Return the numbers of the model and the token ids that end an answer.

    Raises: CheckpointDefect `config_invalid` for impossible values, `config_unsupported` for other architectures.
    """
    fields = checkpoint.config
    _check_supported(checkpoint)

    def size(name: str, default: int | None = None) -> int:
        value = fields.get(name, default)
        if value is None and default is not None:
            value = default
        if type(value) is not int or not 0 < value < _LARGEST_SIZE:
            _refuse(checkpoint, CONFIG_INVALID, f'"{name}" is {value!r}, expected a positive whole number')
        return value

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    kv_heads = size("num_key_value_heads", heads)
    if "head_dim" not in fields and hidden % heads:
        _refuse(checkpoint, CONFIG_INVALID, f"hidden_size {hidden} is not a multiple of {heads} heads")
    head_dim = size("head_dim", hidden // heads)
    if heads % kv_heads or head_dim % 2:
        _refuse(checkpoint, CONFIG_INVALID, f"{heads} heads of size {head_dim} do not fit {kv_heads} key heads")
    vocabulary, positions = size("vocab_size"), size("max_position_embeddings", 2048)
    if max_model_len is not None and max_model_len > positions:
        what = f"User-specified max_model_len ({max_model_len}) is greater than max_position_embeddings={positions}"
        _refuse(checkpoint, CONFIG_INVALID, what)
    shape = LlamaShape(
        hidden=hidden,
        intermediate=size("intermediate_size"),
        layers=size("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        max_positions=max_model_len or positions,
        norm_epsilon=_number(checkpoint, fields, "rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(checkpoint),
        is_tied=fields.get("tie_word_embeddings", False) is True,
    )
    ends = fields.get("eos_token_id")
    end_ids = frozenset(ends if isinstance(ends, list) else () if ends is None else (ends,))
    if not all(type(token) is int and 0 <= token < vocabulary for token in end_ids):
        _refuse(
            checkpoint, CONFIG_INVALID, f'"eos_token_id" is {ends!r}, beyond the {vocabulary} tokens of the vocabulary'
        )
    return shape, end_ids


def stored_dtype(checkpoint: Checkpoint) -> str:
    """Return the dtype that the config says the weights have.

    Raises: CheckpointDefect when it names none, or one that is no float.
    """
    dtype = checkpoint.config.get("torch_dtype", checkpoint.config.get("dtype"))
    if dtype not in _FLOAT_DTYPES:
        _refuse(checkpoint, CONFIG_INVALID, f'"torch_dtype" is {dtype!r}, expected one of {", ".join(_FLOAT_DTYPES)}')
    return str(dtype)


def _check_supported(checkpoint: Checkpoint) -> None:
    fields = checkpoint.config
    only: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
        ("architectures", ["LlamaForCausalLM"], (["LlamaForCausalLM"],)),
        ("model_type", "llama", ("llama",)),
        ("hidden_act", "silu", ("silu",)),
        ("attention_bias", False, (False,)),
        ("mlp_bias", False, (False,)),
        ("rope_scaling", None, (None,)),
        ("quantization_config", None, (None,)),
    )
    for name, default, accepted in only:
        value = fields.get(name, default)
        if value not in accepted:
            _refuse(checkpoint, CONFIG_UNSUPPORTED, f'"{name}" is {str(value)[:100]}, implemented: {accepted[0]}')


def _rope_theta(checkpoint: Checkpoint) -> float:
    parameters = checkpoint.config.get("rope_parameters")
    if parameters is None:
        return _number(checkpoint, checkpoint.config, "rope_theta", 10000.0)
    if not isinstance(parameters, Mapping) or parameters.get("rope_type", "default") != "default":
        _refuse(checkpoint, CONFIG_UNSUPPORTED, f'"rope_parameters" is {str(parameters)[:100]}, implemented: default')
    return _number(checkpoint, parameters, "rope_theta", 10000.0)


def _number(checkpoint: Checkpoint, fields: Mapping[str, Any], name: str, default: float) -> float:
    value = fields.get(name, default)
    if type(value) not in (int, float) or not 0 < value < 1e12:
        _refuse(checkpoint, CONFIG_INVALID, f'"{name}" is {value!r}, expected a positive number')
    return float(value)


def _refuse(checkpoint: Checkpoint, reason: str, what: str) -> NoReturn:
    raise CheckpointDefect(reason, what, path=checkpoint.path / "config.json")
