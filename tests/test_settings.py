"""Options win over the environment, which wins over defaults; what cannot be used is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.settings import settings_from


def test_option_wins_over_environment_over_default(tmp_path: Path) -> None:
    environment = {"ROLLOUT_ENGINE": "process", "ROLLOUT_SEED": "7", "ROLLOUT_GPUS": "0, 2"}
    settings = settings_from({"engine": "reference", "results": str(tmp_path)}, environment)
    assert (settings.engine, settings.seed, settings.gpus) == ("reference", 7, ("0", "2"))
    assert settings.results == tmp_path
    assert settings.vllm_version == "0.32.0"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine": "vllm"}, 'engine "vllm" is unknown; engines: auto'),
        ({"model": "gpt"}, 'model "gpt" is unknown'),
        ({"seed": "many"}, 'seed must be a whole number, got "many"'),
        ({"max_model_len": "64"}, "max_model_len must be at least 128 tokens, got 64"),
        ({"patience": "0.5"}, "patience must be at least 1, got 0.5"),
        ({"memory_gib": "0"}, "memory must be a positive number of GiB, got 0"),
        ({"engine_arguments": "--a 'b"}, "cannot be read as a command line"),
        ({"engine_arguments": "-tp 2 --host 0.0.0.0"}, 'engine argument "--host" cannot be given'),
        ({"engine_arguments": "--port=80"}, 'engine argument "--port" cannot be given'),
        ({"engine_arguments": "--served_model_name x"}, 'engine argument "--served-model-name" cannot be given'),
        ({"old": "/nowhere"}, "must be given together"),
        ({"old": "/nowhere", "new": "/nowhere"}, 'old checkpoint "/nowhere" is not a readable directory'),
    ],
)
def test_value_that_cannot_be_used_is_named(options: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        settings_from(options, {})


def test_a_key_that_cannot_be_given_is_not_repeated() -> None:
    with pytest.raises(UsageError, match='engine argument "--api-key" cannot be given') as refused:
        settings_from({"engine_arguments": "--api-key=geheim"}, {})
    assert "geheim" not in str(refused.value)


def test_further_engine_arguments_are_read_as_a_shell_would() -> None:
    settings = settings_from({"engine_arguments": "--tensor-parallel-size 2 --x 'a b'", "memory_gib": "64"}, {})
    assert settings.engine_arguments == ("--tensor-parallel-size", "2", "--x", "a b")
    assert settings.memory_gib == 64
