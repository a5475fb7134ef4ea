"""Launch options are taken as the parser of each release takes them; every case here was put to the real parsers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.guards.finding import Severity
from harness.guards.launch_options import Launch, read_options
from harness.guards.releases import RELEASES_READ, launch_options, release_of


def read(*arguments: str, release: str = "0.32.0") -> Launch:
    return read_options(arguments, release_of(release))


@pytest.mark.parametrize(
    "line",
    [
        "/m",
        "/m --tensor-parallel-size 2",
        "/m --tensor_parallel_size=2",
        "/m -tp 2 -pp=1 -dcp 1",
        "/m --tensor 2",  # argparse takes a beginning that is unique
        "/m --gpu-mem 0.5",
        "/m -qawq",
        "/m -n2",
        "/m -O3",
        "/m -O 2",
        "/m -O=1",
        "/m --max-model-len 25.6k",
        "/m --max-model-len auto",
        "/m --max-model-len -1",
        "/m --max-num-batched-tokens 4K",
        "/m --no-enable-prefix-caching",
        "/m --no_enable_prefix_caching",
        "/m -cc.mode 3",
        "/m --compilation-config.pass_config.fuse_norm_quant true",
        '/m --compilation-config {"mode":3}',
        "/m --hf-overrides.rope_theta 1e6",
        "/m --kv-transfer-config.kv_connector X",
        "/m --served-model-name a b c",
        "/m --hf-token",
        "/m --hf-token x",
        "/m --moe-backend flashinfer-cutlass",
        "/m --quantization None",
        "--model /m --dtype half",
        "/m --download-dir -",
    ],
)
def test_lines_that_the_engine_takes(line: str) -> None:
    assert [problem.seen for problem in read(*line.split(" ")).problems] == []


@pytest.mark.parametrize(
    ("line", "seen", "remedy"),
    [
        ("--dtype fp16", '--dtype "fp16"', "use --dtype float16"),
        ("--dtype=bf16", '--dtype "bf16"', "use --dtype bfloat16"),
        ("--disable-weight-cache", '"--disable-weight-cache"', "leave it out; vLLM has no such flag"),
        ("--tensor-paralel-size 2", '"--tensor-paralel-size"', "did you mean --tensor-parallel-size?"),
        ("--tensor-parallel-size two", '--tensor-parallel-size "two"', "use a whole number"),
        ("--tensor-parallel-size", "--tensor-parallel-size", "give --tensor-parallel-size a value"),
        ("--tensor-parallel-size --dtype half", "--tensor-parallel-size", "give --tensor-parallel-size a value"),
        ("--max-model-len 1.5K", '--max-model-len "1.5K"', 'use a number or "auto"'),
        ("--enforce-eager=true", '--enforce-eager="true"', "write --enforce-eager alone"),
        ("--data-parallel-r 1", '"--data-parallel-r", which may mean', "write the option out in full"),
        ("--disable-log-requests", '"--disable-log-requests"', "write --no-enable-log-requests"),
        ("--disable-prefix-caching", '"--disable-prefix-caching"', "write --no-enable-prefix-caching"),
        ("--no-cascade-attn", '"--no-cascade-attn"', "write --disable-cascade-attn"),
        ("--speculative-config {x", '--speculative-config "{x"', "correct the value"),
        ('--compilation-config {"mod":3}', "--compilation-config", "correct the value"),
        ("--compilation-config 3", '--compilation-config "3"', "correct the value"),
        ("--task generate", '"--task"', "use --runner pooling"),
        ("-dtype half", '"-dtype"', "did you mean --dtype?"),
        ("/m /n", '"/n" belongs to no option', "quote or remove it"),
        ("/m --model /n", '"/m" belongs to no option', "quote or remove it"),
        ("-cc.mode", "-cc.mode", "give -cc.mode a value"),
    ],
)
def test_lines_that_the_engine_refuses(line: str, seen: str, remedy: str) -> None:
    problems = read(*line.split(" ")).problems
    assert len(problems) == 1
    assert (problems[0].id, problems[0].severity) == ("L01", Severity.REFUSES)
    assert problems[0].seen.startswith(seen)
    assert problems[0].remedy.startswith(remedy)


def test_flags_and_spellings_differ_by_release() -> None:
    for release in RELEASES_READ:
        is_new = release == "0.33.0"
        assert bool(read("--disable-prefix-caching", release=release).problems) is not is_new
        assert not read("--no-enable-prefix-caching", release=release).problems
        assert read("--no-enable-prefix-caching", release=release).flags == {"--enable-prefix-caching": False}
    (problem,) = read("--watchdog-config", "{}", release="0.32.0").problems
    assert problem.remedy == "leave it out, or use a release that has it (0.33.0)"
    assert read("--disable-prefix-caching", release="0.33.0").flags == {"--enable-prefix-caching": False}


def test_a_release_that_was_not_read_may_have_any_flag() -> None:
    for release in ("0.34.0", "0.21.0", "0.30.7"):
        assert read("--strange", "1", "--dtype", "half", release=release).problems == []
        assert read("--dtype", "fp16", release=release).problems


def test_values_are_found_under_the_first_spelling() -> None:
    launch = read(
        "/m", "-tp=4", "--max_model_len", "4k", "-cc.mode=3", "-cc.a.b+", "x,y", "-ep", "--lora-modules", "a=b"
    )
    assert launch.number("--tensor-parallel-size") == 4
    assert launch.number("--max-model-len") == 4000
    assert launch.json("--compilation-config") == {"mode": 3, "a": {"b": ["x", "y"]}}
    assert launch.flags == {"--enable-expert-parallel": True}
    assert launch.number("--pipeline-parallel-size", 1) == 1


def test_an_option_given_twice_is_a_risk_and_the_last_one_counts() -> None:
    launch = read("--dtype", "half", "--dtype", "bfloat16")
    (problem,) = launch.problems
    assert (problem.severity, launch.text("--dtype")) == (Severity.RISK, "bfloat16")
    assert read("--dtype", "half", "--dtype", "half").problems == []


WORDS = st.one_of(
    st.sampled_from(sorted(launch_options(release_of("0.32.0")))),
    st.sampled_from(
        ["-", "--", "-1", "-0.5", "{", "{}", "[" * 3000, "9" * 5000, "9" * 400 + "k", "9" * 400 + "K", "\0"]
    ),
    st.text(max_size=8),
    st.builds("{}={}".format, st.sampled_from(["--dtype", "-tp", "-cc.x", "--hf-overrides"]), st.text(max_size=8)),
)


@given(st.lists(WORDS, max_size=10))
def test_any_words_give_findings_never_an_exception(words: list[str]) -> None:
    launch = read_options(words, release_of("0.32.0"))
    for problem in launch.problems:
        assert problem.as_text()
    for name in launch.values:
        launch.number(name)
        launch.json(name)
        launch.text(name)
