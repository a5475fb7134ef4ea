"""Put our own load and other tools on the same stub, one after the other, and print how they compare.

Run: python benchmarks/load_peers.py [--duration-s 8] [--vllm-python PYTHON] [--guidellm-venv DIR] [--aiperf-venv DIR]
Per tool: the error of the first token (its quantile minus that of the stub's own clock) at 40 streams of 50 events/s; the
error of its p95 when the server freezes for 2 s at 20 requests/s; how many stream faults, all of them after an HTTP 200,
it reports as failed. A tool that is not given is skipped, and said to be. Plain locust comes with the harness.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from load_stub import RunningStub, run_own_load, running_stub

from harness.checkpoint.models import default_cache, tiny_llama
from harness.load.shape import RequestLimits, constant

STREAMS, EVENTS_RPS, FIRST_S = 40, 50, 0.05
FREEZE_S, FREEZE_RPS, FREEZE_COUNT, FREEZE_AT = 2.0, 20.0, 200, 80
FREEZE_FIRST_S = 0.02  # less than a gap, so that no request waits that came before the freeze
TOOL_LIMIT_S, STALL_LIMIT_S = 300.0, 30.0
FAULTS = (
    "reset_mid_stream",
    "cut_between_chunks",
    "cut_chunk",
    "inband_error",
    "no_done",
    "no_finish",
    "too_few",
    "abort",
    "bad_json",
    "wrong_model",
    "mixed_model",
)
VLLM_BENCH = (
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = FlexibleArgumentParser()\nadd_cli_args(parser)\nmain(parser.parse_args())"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a tool is asked to send; `rate_rps` None: one request after the other."""

    mode: str
    count: int
    tokens: int
    rate_rps: float | None
    limit_s: float = TOOL_LIMIT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a tool says of its requests in the order it sent them; `raised` beside its statistics, not in them."""

    first_token_s: list[float | None]
    failed: list[bool]
    raised: list[bool]


Tool = Callable[[RunningStub, Load], Seen]


def main() -> None:
    """Run every tool and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration-s", type=float, default=8.0)
    parser.add_argument("--vllm-python", type=Path, help="interpreter with vLLM, for vllm bench serve")
    parser.add_argument("--guidellm-venv", type=Path)
    parser.add_argument("--aiperf-venv", type=Path)
    parser.add_argument("--only", default="", help="comma-separated names of tools")
    options = parser.parse_args()
    tokenizer = str(tiny_llama(seed=1).build(default_cache()))
    tools: dict[str, Tool | str] = {
        "harness": own,
        "locust FastHttpUser": lambda stub, load: locust(stub, load, "fast"),
        "locust HttpUser": lambda stub, load: locust(stub, load, "http"),
        "vllm bench serve": _given(options.vllm_python, "--vllm-python", lambda p: vllm_bench(p, tokenizer)),
        "GuideLLM": _given(options.guidellm_venv, "--guidellm-venv", lambda p: guidellm(p / "bin/guidellm", tokenizer)),
        "AIPerf": _given(options.aiperf_venv, "--aiperf-venv", lambda p: aiperf(p / "bin/aiperf", tokenizer)),
    }
    base: tuple[float, float] | None = None
    print(f"{'tool':<22}{'first token error p50, p99':>34}{'p95 of the freeze':>30}   stream faults reported")
    for name, tool in tools.items():
        if options.only and name not in options.only.split(","):
            continue
        if isinstance(tool, str):
            print(f"{name:<22}skipped: {tool}")
            continue
        try:
            errors = first_token_errors(tool, options.duration_s)
            base = base or errors
            ratio = ", ".join(
                f"x{abs(error) / max(abs(own_error), 1e-3):,.0f}" for error, own_error in zip(errors, base, strict=True)
            )
            shown = f"{errors[0]:,.2f}, {errors[1]:,.2f} ms ({ratio})"
            seen_s, true_s = freeze_p95(tool)
            frozen = f"{seen_s * 1e3:,.0f} of {true_s * 1e3:,.0f} ms ({seen_s / true_s - 1:+.1%})"
            print(f"{name:<22}{shown:>34}{frozen:>30}   {faults_reported(tool)}")
        except (OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
            print(f"{name:<22}skipped: {type(error).__name__}: {error}")


def first_token_errors(tool: Tool, duration_s: float) -> tuple[float, float]:
    """Return the error of the median and of p99 of the first token, in ms, at 40 streams of 50 events/s."""
    rate_rps = STREAMS / (FIRST_S + 1.0)
    load = Load(mode="streams", count=round(rate_rps * duration_s), tokens=EVENTS_RPS, rate_rps=rate_rps)
    with running_stub("--first-s", str(FIRST_S), "--pace-s", str(1 / EVENTS_RPS)) as stub:
        seen = tool(stub, load)
    truth = [(one["sent_ns"][0] - one["read_ns"]) / 1e6 for one in stub.served if one["sent_ns"]]
    values = [value * 1e3 for value in seen.first_token_s if value is not None]
    p50, p99 = np.percentile(values, [50, 99]) - np.percentile(truth, [50, 99])
    return float(p50), float(p99)


def freeze_p95(tool: Tool) -> tuple[float, float]:
    """Return the p95 that the tool says, and that of users who come 20 times a second whatever the server does."""
    load = Load(mode="freeze", count=FREEZE_COUNT, tokens=4, rate_rps=FREEZE_RPS)
    with running_stub(
        "--first-s", str(FREEZE_FIRST_S), "--freeze-at-request", str(FREEZE_AT), "--freeze-s", str(FREEZE_S)
    ) as stub:
        seen = tool(stub, load)
    since_s = (np.arange(FREEZE_COUNT) - FREEZE_AT) / FREEZE_RPS
    truth = FREEZE_FIRST_S + np.where((since_s >= 0) & (since_s < FREEZE_S), FREEZE_S - since_s, 0.0)
    values = [value for value in seen.first_token_s if value is not None]
    return float(np.percentile(values, 95)), float(np.percentile(truth, 95))


def faults_reported(tool: Tool) -> str:
    """Return how many of the stream faults the tool reports, and what it missed; whole answers are among them."""
    faults = ("ok", *FAULTS, "ok")
    load = Load(mode="faults", count=len(faults), tokens=8, rate_rps=None)
    with running_stub("--faults", ",".join(faults)) as stub:
        seen = tool(stub, load)
    names = [one["fault"] for one in stub.served][-len(seen.failed) :]  # some send one more before they begin
    reported = {name for name, is_failed in zip(names, seen.failed, strict=True) if is_failed}
    raised = {name for name, has_raised in zip(names, seen.raised, strict=True) if has_raised} - reported
    with (
        running_stub("--faults", "stall") as stub,
        suppress(subprocess.TimeoutExpired, LookupError, OSError, ValueError),
    ):
        stalled = tool(stub, Load(mode="faults", count=1, tokens=8, rate_rps=None, limit_s=STALL_LIMIT_S))
        if stalled.failed and stalled.failed[-1]:
            reported.add("stall")
        elif stalled.raised and stalled.raised[-1]:
            raised.add("stall")
    wanted = (*FAULTS, "stall")
    missed = [name for name in wanted if name not in reported]
    return (
        f"{len(wanted) - len(missed)} of {len(wanted)}"
        + (f", {len(raised & set(wanted))} more only as an exception of a task" if raised else "")
        + (", and one that was whole" if "ok" in reported else "")
        + (f"; missed: {', '.join(missed)}" if missed else "")
    )


def own(stub: RunningStub, load: Load) -> Seen:
    """Send the load with the harness itself; the freeze counts from the planned start, the first token from the send."""
    limit_s = 2.0 if load.mode == "faults" else 30.0
    limits = RequestLimits(connect_s=limit_s, first_token_s=limit_s, gap_s=limit_s, total_s=limit_s * 3)
    rate_rps = load.rate_rps or 4.0
    shape = constant(rate_rps=rate_rps, canary_ratio=0.0, output_tokens=load.tokens, limits=limits)
    run = run_own_load(stub, shape, duration_s=load.count / rate_rps, exactly=load.count)
    requests = sorted(run.requests, key=lambda request: request.planned_ns)
    first = [
        request.first_token_s
        if load.mode == "freeze" or request.first_token_ns is None or request.sent_ns is None
        else (request.first_token_ns - request.sent_ns) / 1e9
        for request in requests
    ]
    return Seen(
        first_token_s=first, failed=[request.result != "ok" for request in requests], raised=[False] * len(requests)
    )


def locust(stub: RunningStub, load: Load, user: str) -> Seen:
    """Send the load with a plain locust user: 40 or 4 users that wait for their answers, or one."""
    users = {"streams": STREAMS, "freeze": 4, "faults": 1}[load.mode]
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "seen.json"
        command = [sys.executable, "-m", "locust", "-f", str(Path(__file__).with_name("load_locust_user.py"))]
        command += ["--headless", "--host", stub.endpoint, "-u", str(users), "-r", str(users), "--only-summary"]
        if load.rate_rps is not None:
            command += ["-t", f"{load.count / load.rate_rps:.0f}s"]
        count = load.count if load.mode == "faults" else 10**9
        told = {"PEER_USER": user, "PEER_MODE": load.mode, "PEER_TOKENS": str(load.tokens), "PEER_COUNT": str(count)}
        _run(command, limit_s=load.limit_s, environment={**told, "PEER_OUT": str(out)})
        seen = json.loads(out.read_text(encoding="utf-8"))
    return Seen(
        first_token_s=[one["first_token_s"] for one in seen],
        failed=[one["is_failed"] for one in seen],
        raised=[one.get("has_raised", False) for one in seen],
    )


def vllm_bench(python: Path, tokenizer: str) -> Tool:
    """Return what sends a load with vLLM's own client."""

    def tool(stub: RunningStub, load: Load) -> Seen:
        with tempfile.TemporaryDirectory() as directory:
            command = [str(python), "-c", VLLM_BENCH, "--backend", "openai", "--base-url", stub.endpoint]
            command += ["--endpoint", "/v1/completions", "--model", "m", "--tokenizer", tokenizer]
            command += ["--dataset-name", "random", "--random-input-len", "24", "--random-output-len", str(load.tokens)]
            command += ["--num-prompts", str(load.count), "--num-warmups", "0", "--ready-check-timeout-sec", "0"]
            command += ["--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed"]
            command += ["--result-dir", directory, "--result-filename", "r.json"]
            even = ["--request-rate", str(load.rate_rps), "--burstiness", "1000"]
            command += ["--max-concurrency", "1"] if load.rate_rps is None else even
            _run(command, limit_s=load.limit_s)
            result = json.loads((Path(directory) / "r.json").read_text(encoding="utf-8"))
        failed = [bool(error) for error in result["errors"]]
        first = [None if bad else ttft for ttft, bad in zip(result["ttfts"], failed, strict=True)]
        return Seen(first_token_s=first, failed=failed, raised=[False] * len(failed))

    return tool


def guidellm(program: Path, tokenizer: str) -> Tool:
    """Return what sends a load with GuideLLM."""

    def tool(stub: RunningStub, load: Load) -> Seen:
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "r.json"
            profile = "kind=synchronous" if load.rate_rps is None else f"kind=constant,rate={load.rate_rps}"
            command = [str(program), "run", "--disable-console", "--profile", profile]
            command += ["--backend", f"kind=openai_http,target={stub.endpoint},model=m,request_format=/v1/completions"]
            command += ["--constraint", f"kind=max_requests,count={load.count}"]
            command += ["--tokenizer", f"kind=hf_auto,model={tokenizer}", "--output", f"kind=json,path={out}"]
            command += ["--data", f"kind=synthetic_text,prompt_tokens=24,output_tokens={load.tokens}"]
            _run(command, limit_s=load.limit_s)
            requests = json.loads(out.read_text(encoding="utf-8"))["benchmarks"][0]["requests"]
        known = [(one, state != "successful") for state in requests for one in requests[state] or ()]
        known.sort(key=lambda pair: pair[0]["request_start_time"])
        first = [None if bad else one["time_to_first_token_ms"] / 1e3 for one, bad in known]
        return Seen(first_token_s=first, failed=[bad for _, bad in known], raised=[False] * len(known))

    return tool


def aiperf(program: Path, tokenizer: str) -> Tool:
    """Return what sends a load with AIPerf."""

    def tool(stub: RunningStub, load: Load) -> Seen:
        with tempfile.TemporaryDirectory() as directory:
            command = [str(program), "profile", "--model", "m", "--url", stub.endpoint, "--streaming", "--ui", "none"]
            command += ["--endpoint-type", "completions", "--tokenizer", tokenizer, "--artifact-dir", directory]
            command += ["--synthetic-input-tokens-mean", "24", "--output-tokens-mean", str(load.tokens)]
            command += ["--request-count", str(load.count), "--request-timeout-seconds", "5"]
            even = ["--request-rate", str(load.rate_rps), "--request-rate-mode", "constant"]
            command += ["--concurrency", "1"] if load.rate_rps is None else even
            _run(command, limit_s=load.limit_s)
            lines = (Path(directory) / "profile_export.jsonl").read_text(encoding="utf-8").splitlines()
        known = sorted(map(json.loads, lines), key=lambda one: one["metadata"]["request_start_ns"])
        failed = [one.get("error") is not None for one in known]
        first = [
            None if bad else one["metrics"]["time_to_first_token"]["value"] / 1e3
            for one, bad in zip(known, failed, strict=True)
        ]
        return Seen(first_token_s=first, failed=failed, raised=[False] * len(failed))

    return tool


def _given(path: Path | None, option: str, make: Callable[[Path], Tool]) -> Tool | str:
    if path is None:
        return f"{option} is not given"
    return make(path.absolute()) if path.exists() else f'{option} "{path}" does not exist'


def _run(command: Sequence[str], *, limit_s: float, environment: Mapping[str, str] | None = None) -> None:
    """Run a tool to its end and end what it left; whether it succeeded is seen from what it wrote."""
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    ) as process:
        try:
            process.wait(limit_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
