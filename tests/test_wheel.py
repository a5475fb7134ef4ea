"""What `pip install` brings is whole: data files, the image's build files, and a command, without the repository."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from harness.engine import image

ROOT = Path(__file__).resolve().parents[1]
DATA = (".Dockerfile", ".css", ".html", ".json", ".txt", "METADATA", "py.typed")
LIMIT_S = 300.0
DISTRIBUTIONS = {"pynvml": "nvidia-ml-py", "simdjson": "pysimdjson"}
ENGINE_SIDE = {"torch", "transformers", "vllm", "vllm_rollout_weight_cache_store"}  # imported where an engine runs


@pytest.mark.slow
def test_the_wheel_holds_every_data_file_and_works_without_the_repository(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, timeout=LIMIT_S, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    here = {path for path in (ROOT / "harness").rglob("*") if path.is_file() and path.name.endswith(DATA)}
    here |= {ROOT / "harness/engine/images" / name for name in image._BUILD_FILES}
    assert {str(path.relative_to(ROOT)) for path in here} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith(("tests/", "scenarios/"))]

    code = "import harness.engine.image as i; print(i.__file__, i.inputs_digest('0.32.0', None))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    asked = [sys.executable, "-P", "-c", code]
    done = subprocess.run(
        asked, cwd=tmp_path, env=environment, check=True, timeout=LIMIT_S, capture_output=True, text=True
    )
    place, digest = done.stdout.split()
    assert Path(place).is_relative_to(tmp_path / "site")
    assert digest == image.inputs_digest("0.32.0", None)


def test_what_the_package_imports_is_declared_and_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (name for extra in ("models", "signing") for name in project["optional-dependencies"][extra])
    needed, optional = (
        {re.split(r"[><=\[; ]", text)[0].lower() for text in texts} for texts in (project["dependencies"], extras)
    )
    trees = [ast.parse(path.read_text()) for path in (ROOT / "harness").rglob("*.py")]
    names = {
        alias.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    names |= {
        node.module for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
    }
    foreign = {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"harness"} - ENGINE_SIDE
    distributions = {DISTRIBUTIONS.get(name, name).lower().replace("_", "-") for name in foreign}
    assert distributions <= needed | optional
    assert needed <= distributions
