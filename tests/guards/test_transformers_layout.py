"""What transformers would build agrees with the built-in formulas, finds the same damages, and runs no foreign code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.errors import EXIT_USAGE, EnvironmentMissing
from harness.guards.transformers_layout import deep_findings
from tests.guards.layout_files import load, names

ROOT = Path(__file__).parent.parent.parent
HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"auto_map": {"AutoModelForCausalLM": "own.Model"}}, "code of its own"),
    ({"num_hidden_layers": 10**9}, "more than 2,000"),
    ({"num_local_experts": 10**9}, "more than 10,000"),
    ({"model_type": "../../x"}, "no model_type"),
    ({"model_type": ["llama"]}, "no model_type"),
    ({"model_type": "bert"}, "wants a LlamaConfig"),
    ({"architectures": ["os.system"]}, "no architecture"),
    ({"architectures": ["AutoTokenizer"]}, "no architecture"),
    ({"architectures": []}, "no architecture"),
    ({"hidden_size": "32"}, "could not build"),
    ({"rope_scaling": [1]}, "could not build"),
    ({"hidden_size": -4}, "could not build"),
]


@pytest.fixture(scope="module")
def interpreter() -> str:
    if "ROLLOUT_PYTHON" not in os.environ:
        raise EnvironmentMissing("python", "ROLLOUT_PYTHON names no interpreter with torch and transformers")
    return os.environ["ROLLOUT_PYTHON"]


def run(interpreter: str, *arguments: str, given: str = "") -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [interpreter, *arguments],
        input=given,
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("module", ["torch", "transformers", "transformers.core_model_loading"])
def test_without_transformers_it_says_where_to_run(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    monkeypatch.setitem(sys.modules, "transformers", sys)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(EnvironmentMissing, match="inside the engine's image") as caught:
        list(deep_findings(load("llama").as_checkpoint()))
    assert caught.value.exit_code == EXIT_USAGE


@pytest.mark.slow
def test_transformers_agrees_with_the_formulas(interpreter: str) -> None:
    """On every layout as captured, and on one damage of each kind to every kind of tensor."""
    results = [json.loads(line) for line in run(interpreter, "-m", "tests.guards.deep_agreement").splitlines()]
    assert [result["name"] for result in results] == names()
    for result in results:
        assert result["good"] == []
        assert result["missed"] == []
        assert result["damages"] > 20
        if result["has_formula"]:
            # a bias that transformers has and vLLM's model has not: absent, it is missed by one and not by the other
            assert all("self_attn.o_proj.bias" in damage for damage in result["different"]), result
            assert (result["different"] == {}) == (load(result["name"]).config.get("attention_bias") is not True) or (
                result["name"] == "llama-biases-head-dim"
            )


@pytest.mark.slow
def test_configs_that_no_model_can_be_built_from_are_said_to_be_unchecked(interpreter: str) -> None:
    code = (
        "import sys, json\n"
        "from dataclasses import replace\n"
        "from harness.guards.transformers_layout import deep_findings\n"
        "from tests.guards.layout_files import load\n"
        "for change in json.load(sys.stdin):\n"
        "    layout = load('llama')\n"
        "    layout.config.update(change)\n"
        "    print(json.dumps([[f.id, f.severity, f.seen] for f in deep_findings(layout.as_checkpoint())]))\n"
    )
    lines = run(interpreter, "-c", code, given=json.dumps([change for change, _ in HOSTILE])).splitlines()
    assert len(lines) == len(HOSTILE)
    for line, (change, reason) in zip(lines, HOSTILE, strict=True):
        found = json.loads(line)
        assert [(fault_id, severity) for fault_id, severity, _ in found] == [("C06", "risk")], (change, found)
        assert reason in found[0][2], (change, found)


@pytest.mark.slow
def test_older_files_without_the_prefix_and_with_buffers_are_known(interpreter: str) -> None:
    code = (
        "from harness.guards.transformers_layout import deep_findings\n"
        "from tests.guards.layout_files import load\n"
        "layout = load('gpt2')\n"
        "bare = {name.removeprefix('transformer.'): shape for name, shape in layout.shapes.items()}\n"
        "bare |= {'h.0.attn.bias': (1, 1, 64, 64), 'h.1.attn.bias': (1, 1, 64, 64)}\n"
        "print([f.id for f in deep_findings(layout.with_shapes(bare).as_checkpoint())])\n"
        "del bare['h.1.mlp.c_fc.weight']\n"
        "print([(f.id, f.where) for f in deep_findings(layout.with_shapes(bare).as_checkpoint())])\n"
    )
    assert run(interpreter, "-c", code).splitlines() == ["[]", "[('D04', 'tensor \"h.1.mlp.c_fc.weight\"')]"]
