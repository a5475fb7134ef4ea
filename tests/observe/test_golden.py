"""A golden is measured with its noise, says so when checkpoints cannot be told apart, and no engine blesses itself."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoint.copy import load_shard, save_shard
from harness.checkpoint.models import tiny_llama
from harness.engine.engine import EngineIdentity, EngineSite
from harness.engine.launch import Launch, WeightCache
from harness.engine.reference.check import forward_logprobs
from harness.engine.reference_starter import ReferenceStarter
from harness.errors import GoldenUnusable, HarnessError
from harness.goldens import Goldens, require_own_weights
from harness.guards.canary import (
    PASS_TOKENS_MAX,
    Golden,
    GoldenPair,
    LogprobRows,
    TokenRows,
    of_pass,
    pass_count,
)
from harness.guards.decoded import Decoded
from harness.label import new_label
from harness.observe.canary_prompts import canary_prompts
from harness.observe.golden import GoldenRequest, choose_pair, golden_key, measure_golden, require_agreement
from harness.observe.noise import (
    NOISE_CHECKS_DECODED,
    NOISE_FACTOR,
    STREAMED_TOKENS,
    TOLERANCE_MIN,
    TOLERANCE_MIN_DECODED,
    Answers,
)

IDENTITY = EngineIdentity(kind="stub", name="stub", version="1", build="b", hardware="h")
REQUEST = GoldenRequest(
    source=Path("/checkpoints/one"),
    weights_id="w1",
    launch=Launch(checkpoint_root=Path("/checkpoints"), checkpoint_name="one"),
    prompts=((5, 6, 7), (8, 9, 10)),
    vocabulary_size=64,
)
NOISE = 0.02


def golden(weights_id: str, first: float, *, tolerance: float = 0.01, prompts: TokenRows = ((5, 6, 7),)) -> Golden:
    """Return a golden whose answers are `first` and two."""
    return Golden(
        weights_id=weights_id,
        engine="stub-1",
        build="b",
        hardware="h",
        flags=(),
        prompts=prompts,
        prompt_logprobs=((-first, -2.0),),
        noise_max=0.0,
        noise_checks=40,
        tolerance=tolerance,
    )


# --- choosing prompts ---


def test_other_prompts_are_tried_while_the_checkpoints_answer_alike() -> None:
    pairs = {0: GoldenPair(golden("a", 1.0), golden("b", 1.02)), 1: GoldenPair(golden("a", 1.0), golden("b", 1.5))}
    pair, warnings = choose_pair(pairs.__getitem__)
    assert pair is pairs[1]
    assert len(warnings) == 1
    assert "differ by 0.02 only (tolerance 0.01) on prompts of 3 tokens" in warnings[0]


def test_clearly_different_checkpoints_need_one_measurement_and_no_warning() -> None:
    asked: list[int] = []

    def measure(attempt: int) -> GoldenPair:
        asked.append(attempt)
        return GoldenPair(golden("a", 1.0), golden("b", 1.5))

    assert choose_pair(measure)[1] == ()
    assert asked == [0]


def test_checkpoints_that_no_prompts_tell_apart_are_refused_with_every_attempt_named() -> None:
    with pytest.raises(GoldenUnusable) as refused:
        choose_pair(lambda _: GoldenPair(golden("a", 1.0), golden("b", 1.02)), attempts=2)
    assert str(refused.value).count("differ by 0.02 only") == 2


def test_equal_checkpoints_are_refused_at_once() -> None:
    asked: list[int] = []

    def measure(attempt: int) -> GoldenPair:
        asked.append(attempt)
        return GoldenPair(golden("a", 1.0), golden("a", 1.0))

    with pytest.raises(GoldenUnusable, match=r"are the same \(a\)"):
        choose_pair(measure)
    assert asked == [0]


def test_every_attempt_has_other_and_longer_prompts_and_the_same_seed_the_same() -> None:
    attempts = [canary_prompts(512, seed=1, attempt=number) for number in range(3)]
    assert [len(prompts[0]) for prompts in attempts] == [24, 28, 32]
    assert attempts[1][0][:24] != attempts[0][0]
    assert canary_prompts(512, seed=1) == attempts[0] != canary_prompts(512, seed=2)
    assert all(3 <= token < 512 for prompts in attempts for prompt in prompts for token in prompt)
    for prompts in attempts:  # the price of one pass
        assert all(sum(map(len, of_pass(prompts, turn))) <= PASS_TOKENS_MAX for turn in range(pass_count(prompts)))


def test_prompts_read_as_many_rows_of_the_embedding_as_they_can() -> None:
    tokens = [token for prompt in canary_prompts(512, seed=1) for token in prompt]
    assert len(set(tokens)) == len(tokens) == 8 * 24
    everything = {token for prompt in canary_prompts(512, seed=1, count=22) for token in prompt}
    assert everything == set(range(3, 512))


# --- the key ---


def test_the_key_changes_with_everything_that_may_change_an_answer() -> None:
    def launched(**changes: Any) -> GoldenRequest:
        return replace(REQUEST, launch=replace(REQUEST.launch, **changes))

    keys = [golden_key(IDENTITY, REQUEST)]
    keys += [golden_key(replace(IDENTITY, **{part: "x"}), REQUEST) for part in ("name", "version", "build", "hardware")]
    keys += [
        golden_key(IDENTITY, request)
        for request in (
            replace(REQUEST, weights_id="w2"),
            replace(REQUEST, prompts=((5, 6, 8), (8, 9, 10))),
            launched(dtype="float16"),
            launched(max_model_len=128),
            launched(extra_arguments=("--tensor-parallel-size", "2")),
            launched(environment=(("VLLM_ATTENTION_BACKEND", "x"),)),
        )
    ]
    assert len(set(keys)) == len(keys)


def test_the_key_is_the_same_wherever_the_checkpoint_lies() -> None:
    elsewhere = replace(
        REQUEST,
        source=Path("/other/two"),
        launch=Launch(
            checkpoint_root=Path("/other"), checkpoint_name="two", weight_cache=WeightCache(directory=Path("/cache"))
        ),
    )
    assert golden_key(IDENTITY, elsewhere) == golden_key(IDENTITY, REQUEST)


# --- measuring, against a stub ---


def decoded_choice(count: int, shift: float) -> dict[str, Any]:
    """Return a continuation of tokens 7, whose second best is 1.5 less likely."""
    return {
        "index": 0,
        "token_ids": [7] * count,
        "logprobs": {
            "tokens": ["token_id:7"] * count,
            "token_logprobs": [-0.5 + shift] * count,
            "top_logprobs": [{"token_id:7": -0.5 + shift, "token_id:8": -2.0 + shift}] * count,
        },
        "finish_reason": "length",
    }


class StubEngine:
    """Answers canaries with -1, -2, ..., a little off while other requests are under way; counts what it is asked."""

    def __init__(self, *, noise: float = 0.0, status: int = 200) -> None:
        self.noise = noise
        self.status = status
        self.others = 0
        self.canaries = 0
        self.decoded = 0
        self.shorter = 0
        self.is_stopped = False
        self.fails_others = False
        self.log_path = Path("/logs/golden.log")
        self.launches: list[tuple[Launch, str]] = []
        self._lock = threading.Lock()
        self._under_way = 0
        self._ended = threading.Event()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                text = json.dumps(stub.answer(body)).encode()
                is_other = "prompt_logprobs" not in body and "logprobs" not in body
                self.send_response(500 if is_other and stub.fails_others else stub.status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *arguments: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("return_token_ids"):
            with self._lock:
                self.decoded += 1
                shift = self.noise if self._under_way else 0.0
            return {"choices": [decoded_choice(body["max_tokens"] - self.shorter, shift)]}
        if "prompt_logprobs" not in body:
            with self._lock:
                self.others += not self.fails_others
                self._under_way += 1
            self._ended.wait(0.02)
            with self._lock:
                self._under_way -= 1
            return {"choices": [{"index": 0, "text": ""}]}
        with self._lock:
            self.canaries += 1
            shift = self.noise if self._under_way else 0.0
        choices = [
            {
                "index": index,
                "prompt_logprobs": [
                    None,
                    *(
                        {str(token): {"logprob": -float(place) + shift}}
                        for place, token in enumerate(prompt[1:], start=1)
                    ),
                ],
            }
            for index, prompt in enumerate(body["prompt"])
        ]
        return {"choices": choices[::-1]}

    def wait_ready(self, limit_s: float) -> float:
        return 0.0

    def stop(self, grace_s: float = 10.0) -> int | None:
        self.is_stopped = True
        return 0

    def close(self) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    # The stub starts itself.

    def identity(self) -> EngineIdentity:
        return IDENTITY

    def start(self, launch: Launch, *, incarnation: str) -> StubEngine:
        self.launches.append((launch, incarnation))
        return self


@pytest.fixture
def stub() -> Iterator[StubEngine]:
    engine = StubEngine(noise=NOISE)
    yield engine
    engine.close()


def measure(stub: StubEngine, forward: Any = None) -> Golden:
    return measure_golden(stub, REQUEST, api_key="k", seed=1, ready_limit_s=5.0, forward=forward)  # type: ignore[arg-type]


def answers_of(rows: LogprobRows) -> Answers:
    """Return answers without noise."""
    nothing = Decoded(prompt=(), tokens=(), logprobs=(), margins=(), noise_max=0.0, noise_checks=0, tolerance=0.0)
    return Answers(prompt_logprobs=rows, noise_max=0.0, noise_mean=0.0, noise_checks=1, streamed=nothing, deep=None)


def test_noise_is_measured_while_other_requests_are_under_way(stub: StubEngine) -> None:
    seen = measure(stub)
    assert seen.prompt_logprobs == ((-1.0, -2.0), (-1.0, -2.0))
    assert seen.noise_max == pytest.approx(NOISE)
    assert seen.tolerance == pytest.approx(NOISE_FACTOR * NOISE)
    assert stub.canaries == 1 + seen.noise_checks
    assert stub.others > 0
    assert seen.streamed is not None
    assert seen.streamed.tokens == (7,) * STREAMED_TOKENS
    assert seen.streamed.margins == (1.5,) * STREAMED_TOKENS
    assert seen.streamed.noise_max == pytest.approx(NOISE)
    assert seen.streamed.tolerance == pytest.approx(NOISE_FACTOR * NOISE)
    assert stub.decoded == 1 + NOISE_CHECKS_DECODED
    assert seen.deep is None
    assert stub.launches == [(REQUEST.launch, "golden-w1")]
    assert stub.is_stopped


def test_without_noise_a_least_tolerance_remains(stub: StubEngine) -> None:
    stub.noise = 0.0
    seen = measure(stub)
    assert (seen.noise_max, seen.tolerance) == (0.0, TOLERANCE_MIN)
    assert seen.streamed is not None
    assert (seen.streamed.noise_max, seen.streamed.tolerance) == (0.0, TOLERANCE_MIN_DECODED)


def test_a_long_prompt_is_measured_when_asked_for(stub: StubEngine) -> None:
    request = replace(REQUEST, deep=tuple(range(5, 45)))
    seen = measure_golden(stub, request, api_key="k", seed=1, ready_limit_s=5.0, forward=None)  # type: ignore[arg-type]
    assert seen.deep is not None
    assert seen.deep.prompt == tuple(range(5, 45))
    assert seen.deep.tokens == (7,) * 4


def test_continuations_of_changing_length_cannot_be_known(stub: StubEngine) -> None:
    class Shrinking(StubEngine):
        def answer(self, body: dict[str, Any]) -> dict[str, Any]:
            self.shorter = int(self.decoded > 2)
            return super().answer(body)

    engine = Shrinking()
    try:
        with pytest.raises(GoldenUnusable, match="other numbers of tokens"):
            measure(engine)
    finally:
        engine.close()


def test_a_golden_survives_being_saved(stub: StubEngine, tmp_path: Path) -> None:
    seen = measure(stub)
    seen.save(tmp_path / "golden.json")
    assert Golden.load(tmp_path / "golden.json") == seen


def test_engine_that_disagrees_with_our_forward_pass_cannot_say_what_is_right(stub: StubEngine) -> None:
    asked: list[tuple[Path, TokenRows, bool]] = []

    def forward(source: Path, prompts: TokenRows, *, rounded: bool = False) -> LogprobRows:
        asked.append((source, prompts, rounded))
        return ((-1.0, -2.0), (-1.0, -3.0))

    with pytest.raises(
        GoldenUnusable,
        match=r"differs by 0\.25 on average from our own .*limit 0\.15; rounding to bfloat16 alone makes 0\)",
    ):
        measure(stub, forward)
    assert asked == [(REQUEST.source, REQUEST.prompts, False), (REQUEST.source, REQUEST.prompts, True)]
    assert stub.is_stopped


def test_engine_that_agrees_within_its_arithmetic_is_accepted(stub: StubEngine) -> None:
    assert measure(stub, lambda *_: ((-1.0, -2.0), (-1.0, -2.05))).weights_id == "w1"


@pytest.mark.parametrize(("rounding", "limit"), [(0.05, "0.15"), (0.1, "0.2"), (0.13, ""), (9.0, "")])
def test_rounding_that_moves_a_deep_model_far_is_allowed_for(stub: StubEngine, rounding: float, limit: str) -> None:
    def forward(source: Path, prompts: TokenRows, *, rounded: bool = False) -> LogprobRows:
        moved = rounding if rounded else 0.0
        return ((-1.0 - moved, -2.0 - moved), (-1.25 - moved, -2.75 + moved))  # the engine is off by 0.25 on average

    if limit:
        with pytest.raises(
            GoldenUnusable, match=rf"differs by 0\.25 .* \(limit {limit}; rounding to bfloat16 alone makes"
        ):
            measure(stub, forward)
    else:
        assert measure(stub, forward).weights_id == "w1"


def test_no_rounding_excuses_answers_that_are_far_off(stub: StubEngine) -> None:
    def forward(source: Path, prompts: TokenRows, *, rounded: bool = False) -> LogprobRows:
        moved = 9.0 if rounded else 0.0
        return ((-1.6 - moved, -2.6), (-1.6, -2.6))

    with pytest.raises(GoldenUnusable, match=r"differs by 0\.6 .*limit 0\.5"):
        measure(stub, forward)


@pytest.mark.parametrize("forward", [None, lambda *_, rounded=False: ((-1.0, -2.0), (-1.0, -2.0))])
def test_engine_that_is_wrong_under_load_only_cannot_bless_itself(forward: Any) -> None:
    engine = StubEngine(noise=0.8)
    try:
        with pytest.raises(GoldenUnusable, match=r"differs by 0\.\d+ on average from itself once other requests are"):
            measure(engine, forward)
    finally:
        engine.close()
    assert engine.is_stopped


def test_damaged_tensor_of_a_deep_model_is_still_refused(tmp_path: Path) -> None:
    source = tiny_llama(seed=1, layers=42).build(tmp_path)
    prompts = canary_prompts(512, seed=1)
    right = answers_of(forward_logprobs(source, prompts, rounded=True))
    require_agreement(right, source, prompts, forward_logprobs, "an engine in bfloat16")
    damaged = tmp_path / "damaged"
    shutil.copytree(source, damaged)
    shard = next(damaged.glob("*.safetensors"))
    tensors = load_shard(shard)
    name = "model.layers.{}.mlp.down_proj.weight".format
    tensors[name(20)] = tensors[name(7)]
    shard.unlink()
    save_shard(shard, tensors)
    wrong = answers_of(forward_logprobs(damaged, prompts, rounded=True))
    with pytest.raises(GoldenUnusable, match="from our own forward pass on the same weights"):
        require_agreement(wrong, source, prompts, forward_logprobs, "an engine in bfloat16")


def test_engine_that_fails_is_stopped_and_named(stub: StubEngine) -> None:
    stub.status = 500
    with pytest.raises(HarnessError, match="no usable answer: HTTP 500"):
        measure(stub)
    assert stub.is_stopped


# --- the whole way, on the reference engine ---


def test_engine_with_wrong_answers_cannot_bless_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path / "cache"))
    old, new = (tiny_llama(seed=seed).build() for seed in (1, 2))
    starter = ReferenceStarter(defects=("wrong_answer",))
    starter.open(
        EngineSite(
            run_label=str(new_label()), log_directory=tmp_path / "logs", work_directory=tmp_path / "work", api_key="k"
        )
    )
    goldens = Goldens(starter, starter.identity(), api_key="k", seed=1, progress=lambda _: None)
    try:
        with pytest.raises(GoldenUnusable, match="from our own forward pass"):
            goldens.pair(old, new, Launch(checkpoint_root=tmp_path, checkpoint_name="live"))
    finally:
        starter.close()
    assert list((tmp_path / "cache" / "goldens").iterdir()) == []


def test_noise_is_not_claimed_when_the_load_beside_it_broke_off(stub: StubEngine) -> None:
    stub.fails_others = True
    with pytest.raises(GoldenUnusable, match=r"could not be measured under load: 0 requests"):
        measure(stub)
    assert stub.is_stopped


def test_engine_that_served_the_other_checkpoint_cannot_bless_itself(tmp_path: Path) -> None:
    old, new = (tiny_llama(seed=seed).build(tmp_path) for seed in (1, 2))
    prompts = canary_prompts(512, seed=1)
    answers = {source: forward_logprobs(source, prompts) for source in (old, new)}

    def made_of(source: Path) -> Golden:
        return replace(golden(f"w-{source.name}", -1.0, prompts=prompts), prompt_logprobs=answers[source])

    require_own_weights(GoldenPair(made_of(old), made_of(new)), old, new)
    with pytest.raises(GoldenUnusable, match="served other weights"):
        require_own_weights(GoldenPair(made_of(new), made_of(old)), old, new)
