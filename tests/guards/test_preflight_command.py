"""`harness preflight`: what it prints, what it writes, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from harness.checkpoint import models
from harness.checkpoint.copy import load_shard, private_copy, save_shard
from harness.checkpoint.survey import Checkpoint
from harness.errors import EXIT_BROKEN, EXIT_HELD, EXIT_UNKNOWN, EXIT_USAGE
from harness.guards import transformers_layout
from harness.guards.launch_options import Launch
from harness.guards.layout import layout_findings
from harness.guards.manifest_command import manifest_main
from harness.guards.preflight import PreflightFinding, Severity, examine
from harness.guards.preflight_command import main
from harness.guards.releases import newest

SHARD = "model.safetensors"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_llama(hidden=32, intermediate=48).build(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def path(sound: Path, tmp_path: Path) -> Path:
    return private_copy(sound, tmp_path / "checkpoint")


def edit_config(path: Path, **changes: Any) -> None:
    content = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(content))


def test_text(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(path)]) == EXIT_HELD
    assert "nothing that should stop the rollout" in capsys.readouterr().out
    assert main([str(path), "--engine", "vllm==0.32.0", "--", "serve", "--dtype", "fp16"]) == EXIT_BROKEN
    printed = capsys.readouterr().out
    assert printed.startswith("The engine would not start:\n\nL01  launch arguments\n")
    assert "engine    vllm 0.32.0 ends at once with exit code 2 (measured)" in printed
    assert "mend      use --dtype float16" in printed
    assert printed.endswith("do not roll out, 1 finding\n")


def test_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_config(path, intermediate_size=32)
    assert main([str(path), "--json", "--verify", "--", "-tp", "$TP"]) == EXIT_BROKEN
    report = json.loads(capsys.readouterr().out)
    assert {finding["id"] for finding in report["findings"]} == {"C02"}
    assert {finding["severity"] for finding in report["findings"]} == {"silent"}
    assert report["failing"] == len(report["findings"]) == 3
    assert report["engine"] == "vllm 0.33.0"
    assert "cuts the tensors" in report["findings"][0]["consequence"]
    assert report["unchecked"] == ["values with a $: what a shell puts there is not known"]


@pytest.mark.parametrize(
    ("fail_on", "changes", "exit_code"),
    [
        ("refuses,silent", {"tie_word_embeddings": True}, EXIT_HELD),  # a risk
        ("risk", {"tie_word_embeddings": True}, EXIT_BROKEN),
        ("refuses", {"intermediate_size": 32}, EXIT_HELD),  # silent
        ("silent", {"intermediate_size": 32}, EXIT_BROKEN),
        (" refuses , silent,risk", {"intermediate_size": 32}, EXIT_BROKEN),
        ("none", {"intermediate_size": 64}, EXIT_HELD),
    ],
)
def test_fail_on(
    path: Path, fail_on: str, changes: dict[str, Any], exit_code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_config(path, **changes)
    assert main([str(path), "--fail-on", fail_on]) == exit_code
    assert ("nothing that should stop" in capsys.readouterr().out) == (exit_code == EXIT_HELD)


def test_files_for_programs(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_config(path, intermediate_size=64)
    out = {name: tmp_path / f"out.{name}" for name in ("sarif", "junit", "textfile")}
    options = [part for name, file in out.items() for part in (f"--{name}", str(file))]
    assert main([str(path), *options]) == EXIT_BROKEN
    assert "do not roll out" in capsys.readouterr().out
    assert json.loads(out["sarif"].read_text())["runs"][0]["results"][0]["ruleId"] == "C02"
    assert ElementTree.parse(out["junit"]).getroot().get("failures") == "3"
    assert 'id="C02",severity="refuses"} 3\n' in out["textfile"].read_text()


def test_a_file_that_cannot_be_written_is_said_and_not_a_success(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = str(tmp_path / "absent" / "x.prom")
    assert main([str(path), "--textfile", absent]) == EXIT_UNKNOWN
    printed = capsys.readouterr()
    assert "--textfile was not written" in printed.err
    assert "nothing that should stop the rollout" in printed.out
    edit_config(path, intermediate_size=64)
    assert main([str(path), "--textfile", absent]) == EXIT_BROKEN


def test_launch_file(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "start.sh"
    file.write_text("#!/bin/sh\nexec vllm serve /nowhere \\\n  --tensor-parallel-size 3 # three\n")
    assert main([str(path), "--launch-file", str(file)]) == EXIT_BROKEN
    assert "tensor parallel size 3, num_attention_heads 4" in capsys.readouterr().out
    assert main([str(path), "--launch-file", str(file), "--", "-tp", "2"]) == EXIT_USAGE
    assert "exclude each other" in capsys.readouterr().err


def test_manifest(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = tmp_path / "manifest.json"
    assert manifest_main([str(path), "--out", str(manifest)]) == EXIT_HELD
    assert main([str(path), "--manifest", str(manifest)]) == EXIT_HELD
    tensors = load_shard(path / SHARD)
    name = "model.layers.1.mlp.down_proj.weight"
    held = tensors[name]
    tensors[name] = type(held)(held.dtype, held.shape, bytes([held.data[0] ^ 1]) + held.data[1:])
    save_shard(path / SHARD, tensors)
    assert main([str(path), "--verify"]) == EXIT_HELD  # nothing but the digest knows
    capsys.readouterr()
    assert main([str(path), "--manifest", str(manifest)]) == EXIT_BROKEN
    printed = capsys.readouterr().out
    assert name in printed
    assert "vllm 0.33.0 starts and serves the values as they are" in printed


def test_deep_without_transformers_says_so_and_is_unknown(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main([str(path), "--deep"]) == EXIT_UNKNOWN
    printed = capsys.readouterr()
    assert printed.err.startswith("harness preflight: transformers is not available: ")
    assert printed.out == ""


def test_deep_says_once_what_formulas_say_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that transformers would build is stood in for by its findings; building it is tested elsewhere."""

    def built(checkpoint: Checkpoint, *, is_whole: bool) -> Iterator[PreflightFinding]:
        yield from (one for one in layout_findings(checkpoint, is_whole=is_whole) if one.id != "C06")
        yield PreflightFinding(id="D07", severity=Severity.REFUSES, seen="s", expected="e", where="w", remedy="r")

    monkeypatch.setattr(transformers_layout, "deep_findings", built)
    edit_config(path, intermediate_size=32)
    launch = Launch(newest())
    ids = [finding.id for finding in examine(path, launch=launch, deep=True).findings]
    assert ids == ["D07", "C02", "C02", "C02"]
    edit_config(path, architectures=["StrangeForCausalLM"])
    assert [finding.seen for finding in examine(path, launch=launch).findings][-1].endswith("were not checked")
    assert [finding.id for finding in examine(path, launch=launch, deep=True).findings] == ["C06", "D07"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["/absent"],
        [],
        ["--against"],
        ["/", "--strange"],
        ["/", "--against", "/absent"],
        ["/", "--engine", "sglang==1"],
        ["/", "--fail-on", "loud"],
        ["/", "--launch-file", "/absent"],
        ["/", "--manifest", "/absent"],
        ["/", "--public-key", "/absent"],
        ["/", "--", "vllm serve 'x"],
        ["\0"],
        ["/", "--engine", "\x1b[2J"],
    ],
)
def test_wrong_calls_are_one_sentence(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == EXIT_USAGE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    assert "\x1b" not in printed.err


def test_the_command_starts_without_heavy_imports(path: Path) -> None:
    program = (
        "import sys; from harness.cli import main; code = main(sys.argv[1:]); "
        "heavy = ('numpy', 'docker', 'locust', 'torch', 'transformers', 'safetensors', 'yaml', 'xml.etree', 'asyncio'); "
        "print([name for name in heavy if name in sys.modules], code)"
    )
    call = [sys.executable, "-c", program, "preflight", str(path), "--", "vllm", "serve", "m", "-tp", "2"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0"
