"""`harness preflight --deep`: names and shapes of every architecture that the installed transformers knows.

The model is built from config.json on the meta device, so it takes no memory for weights, and is asked what it would save.
Nothing is downloaded, and code that a checkpoint brings is never run. Torch and transformers are imported here alone.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harness.checkpoint.survey import Checkpoint
from harness.errors import EnvironmentMissing
from harness.guards.compared import Compared, numberless
from harness.guards.expected import IGNORED, MAX_EXPERTS, Expected, ExpectedTensor, LayerKind, Loading, architecture
from harness.guards.finding import PreflightFinding, Severity, shortened
from harness.guards.layout import compare

MAX_LAYERS = 2_000
COUNTS = re.compile(r"(^|_)(n_?layers?|num_(hidden_)?layers|layers|depth|(num|n)_(\w+_)?(experts|layers))$")
NOT_FOR_SHAPES = ("quantization_config", "_attn_implementation", "attn_implementation", "dtype", "torch_dtype")
ROWS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj")
COLUMNS = ("o_proj", "down_proj")
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
RUN_IT_THERE = "install torch and transformers 5 or later, or run this inside the engine's image, which has both"


class CannotBuild(ValueError):
    """Why transformers does not build a model from a config; the message says it for people."""


@dataclass(frozen=True)
class Model:
    """What transformers would save: shapes by name, other names of tied weights, names it passes over, parallel layers."""

    shapes: Mapping[str, tuple[int, ...]]
    tied_names: frozenset[str]
    passed_over: tuple[str, ...]  # patterns
    plan: Mapping[str, str]
    base_prefix: str


def deep_findings(checkpoint: Checkpoint, *, is_whole: bool = True) -> Iterator[PreflightFinding]:
    """Yield what is wrong between headers and the model that transformers builds from the config.

    With `is_whole` false, some shards are absent or cannot be read: then absent tensors are not listed one by one.
    Raises: EnvironmentMissing when torch or a usable transformers is not installed.
    """
    config = checkpoint.config
    if not config or not checkpoint.tensors:
        return
    transformers = _transformers()
    try:
        model = _model(config, transformers)
    except CannotBuild as error:
        yield PreflightFinding(
            id="C06",
            severity=Severity.RISK,
            seen=f"{error}: names and shapes were not checked with transformers",
            expected=f"an architecture that transformers {transformers.__version__} builds from config.json alone",
            where='"config.json"',
            remedy="use the transformers of the engine that will serve it; rely on the canary for its tensors",
        )
        return
    tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
    is_quantised = isinstance(config.get("quantization_config"), dict)
    expected = _expected(model, tensors)
    yield from compare(Compared(expected, {}, tensors, is_quantised), is_whole=is_whole)


def _transformers() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read on import; nothing here asks for a file
    try:
        importlib.import_module("torch")
        transformers = importlib.import_module("transformers")
        importlib.import_module("transformers.core_model_loading")  # of release 5 and later
    except ImportError as error:
        raise EnvironmentMissing("transformers", f"{error}; {RUN_IT_THERE}") from None
    return transformers


def _model(config: Mapping[str, Any], transformers: Any) -> Model:
    """Return what the model of a config saves.

    Raises: CannotBuild with the reason.
    """
    name, kind = architecture(config), config.get("model_type")
    if "auto_map" in config:
        raise CannotBuild("the checkpoint brings code of its own (auto_map), which is never run here")
    _refuse_huge(config)
    model_class = getattr(transformers, name, None) if name is not None and name.isidentifier() else None
    if not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
        raise CannotBuild(f'transformers {transformers.__version__} has no architecture "{shortened(name)}"')
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise CannotBuild(f'transformers {transformers.__version__} has no model_type "{shortened(kind)}"')
    values = {key: value for key, value in config.items() if key not in NOT_FOR_SHAPES}
    try:
        with _quiet(transformers):
            return _build(model_class, transformers.CONFIG_MAPPING[kind].from_dict(values), transformers)
    except Exception as error:  # whatever a model's own code raises for a config that it does not expect
        raise CannotBuild(f"transformers could not build it ({type(error).__name__}: {str(error)[:200]})") from error


def _build(model_class: Any, config: Any, transformers: Any) -> Model:
    torch: Any = importlib.import_module("torch")
    wanted = model_class.config_class
    if wanted is not None and not isinstance(config, wanted):
        raise TypeError(f"{model_class.__name__} wants a {wanted.__name__}, model_type names a {type(config).__name__}")
    with torch.device("meta"):
        model = model_class._from_config(config, attn_implementation="eager")
    state = model.state_dict()
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    tied = frozenset(other for names in groups.values() for other in _others(names, model))
    for name in {*tied, *(model._keys_to_ignore_on_save or ())}:
        state.pop(name, None)
    saved = transformers.core_model_loading.revert_weight_conversion(model, state)
    return Model(
        shapes={name: tuple(value.shape) for name, value in saved.items()},
        tied_names=tied,
        passed_over=tuple(model._keys_to_ignore_on_load_unexpected or ()),
        plan=dict(model.tp_plan or {}),
        base_prefix=f"{model.base_model_prefix}.",
    )


def _others(names: list[str], model: Any) -> list[str]:
    """Return all names of one parameter but the one under which it is saved."""
    secondary = model._tied_weights_keys or ()
    saved = next((name for name in names if not any(re.search(key, name) for key in secondary)), names[0])
    return [name for name in names if name != saved]


def _expected(model: Model, present: Mapping[str, Any]) -> Expected:
    shapes = model.shapes
    if not any(name.startswith(model.base_prefix) for name in present):
        # some older files hold the base model alone, without the prefix that it has inside
        bare = {name.removeprefix(model.base_prefix): shape for name, shape in shapes.items()}
        shapes = bare if len(bare.keys() & present.keys()) > len(shapes.keys() & present.keys()) else shapes
    return Expected(
        layers=0,
        dense=LayerKind({}),
        of_model={name: _tensor(name, shape, model.plan) for name, shape in shapes.items()},
        tied="lm_head.weight" in model.tied_names,
        passed_over=(
            IGNORED,
            *(re.compile(pattern) for pattern in model.passed_over),
            *(re.compile(f"^{re.escape(name)}$") for name in model.tied_names if name != "lm_head.weight"),
        ),
        has_experts=any(".experts." in name for name in shapes),
    )


def _tensor(name: str, shape: tuple[int, ...], plan: Mapping[str, str]) -> ExpectedTensor:
    module, _, kind = name.rpartition(".")
    block, _, part = module.rpartition(".")
    if ".experts." in name:
        return ExpectedTensor(shape, Loading.EXPERT, _expert_group(name))
    group = next((f"{block}.{parts[0]}.{kind}" for parts in FUSED if part in parts), "")
    if len(shape) == 2 and ("embed_tokens" in name or part in ("lm_head", "wte", "word_embeddings", "embed_in")):
        return ExpectedTensor(shape, Loading.VOCABULARY)
    parallel = plan.get(numberless(module), "")
    if part in ROWS or parallel.startswith(("colwise", "packed_colwise")):
        return ExpectedTensor(shape, Loading.ROWS, group)
    if (part in COLUMNS or parallel.startswith("rowwise")) and kind == "weight":
        return ExpectedTensor(shape, Loading.COLUMNS, group)
    return ExpectedTensor(shape, Loading.WHOLE, group)


def _expert_group(name: str) -> str:
    """Return which parameter of the engine an expert's tensor becomes a part of; one that holds all experts is whole."""
    numbered = re.match(r"(.*\.experts\.)\d+\.(\w+)", name)
    if numbered is None:
        return ""
    return numbered[1] + ("out" if numbered[2] in ("w2", "down_proj") else "in")


def _refuse_huge(config: Mapping[str, Any], depth: int = 0) -> None:
    """Refuse counts that no model has: each layer is built, which takes time even without memory.

    Raises: CannotBuild naming the key.
    """
    for key, value in config.items():
        if isinstance(value, dict) and depth < 4:
            _refuse_huge(value, depth + 1)
        elif type(value) is int and COUNTS.search(key):
            limit = MAX_EXPERTS if "expert" in key else MAX_LAYERS
            if value > limit:
                raise CannotBuild(f'"{shortened(key)}" is {shortened(value)}, more than {limit:,}')


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keep what transformers says while it builds out of the report."""
    import warnings

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(before)
