"""LoRA adapters on real vLLM while it serves: wrong ones are refused, and which adapter answers is read from its answers.

What is right is a cold computation by our own forward pass on the checkpoint with the adapter merged into it.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError

import pytest
from engine_kinds import API_KEY, PROCESS, opened

from harness.checkpoint.adapter import ADAPTER_WEIGHTS
from harness.checkpoint.lora import Adapter, merged, write_adapter
from harness.checkpoint.models import tiny_llama
from harness.engine.engine import Engine
from harness.engine.launch import SERVED_MODEL_NAME, Launch
from harness.engine.reference.check import forward_logprobs
from harness.faults import AdapterFault
from harness.faults.lora import adapter_prefix, adapter_rank, adapter_width
from harness.faults.target import Target
from harness.guards.canary import TokenRows
from harness.guards.decoded import decode, decoded_difference
from harness.guards.engine_api import EngineApi
from harness.observe.canary_prompts import canary_prompts, deep_prompt

pytestmark = pytest.mark.slow

LIMIT_S = 60.0
MAX_LORA_RANK = 16
NAME = "tuned"
PROMPTS: TokenRows = canary_prompts(512, seed=1, count=6)
# Of the next token's logprob, on average: bf16 differs from our float32 by 0.02, one adapter from another by more than 1.
TOLERANCE = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """An engine with adapters at runtime, and what each of the weights it may serve would answer."""

    engine: Engine
    base: Path
    right: dict[str, Path]  # checkpoints with the adapter merged into them
    adapters: dict[str, Path]

    @property
    def api(self) -> EngineApi:
        return EngineApi(url=self.engine.endpoint, api_key=API_KEY, limit_s=LIMIT_S)

    def load(self, path: Path, *, name: str = NAME, in_place: bool = False) -> tuple[int, str]:
        return self.post("load", {"lora_name": name, "lora_path": str(path), "load_inplace": in_place})

    def unload(self, name: str = NAME) -> tuple[int, str]:
        return self.post("unload", {"lora_name": name})

    def post(self, what: str, body: dict[str, object]) -> tuple[int, str]:
        """Load or unload, and return the status and what was said."""
        request = urllib.request.Request(
            f"{self.engine.endpoint}/v1/{what}_lora_adapter",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def who(self, model: str = NAME) -> str:
        """Return whose answer a model name gives: that of the weights which it is near to, and of no others.

        Asked for the next token alone: a request for prompt logprobs ends an engine with adapters (0.32.0 on CPU).
        """
        steps = [decode(self.api, model, prompt, max_tokens=1) for prompt in PROMPTS]
        continued = [[*prompt, *step.tokens] for prompt, step in zip(PROMPTS, steps, strict=True)]
        near = []
        for name, checkpoint in self.right.items():
            rows = forward_logprobs(checkpoint, continued)
            differences = [abs(row[-1] - step.logprobs[0]) for row, step in zip(rows, steps, strict=True)]
            if sum(differences) / len(differences) <= TOLERANCE:
                near.append(name)
        assert len(near) <= 1, f"{near} cannot be told apart"
        return near[0] if near else "nobody"


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    place = tmp_path_factory.mktemp("lora")
    base = tiny_llama(seed=1).build(place / "models")
    right = {"base": base}
    adapters = {}
    for seed in (1, 2, 3):
        name = f"adapter {seed}"
        adapters[name] = write_adapter(place / "adapters" / str(seed), base, Adapter(seed=seed))
        right[name] = merged(place / "merged" / str(seed), base, adapters[name])
    launch = Launch(
        checkpoint_root=base.parent,
        checkpoint_name=base.name,
        max_model_len=512,
        extra_arguments=("--enable-lora", "--max-lora-rank", str(MAX_LORA_RANK), "--max-loras", "2"),
        environment=(("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1"),),
    )
    (place / "engines").mkdir()
    with opened(PROCESS, place / "engines") as starter:
        engine = starter.start(launch, incarnation="lora")
        engine.wait_ready(PROCESS.ready_limit_s)
        yield Serving(engine=engine, base=base, right=right, adapters=adapters)


@pytest.fixture
def live(serving: Serving, tmp_path: Path) -> Iterator[Path]:
    """Give a directory with the first adapter, which a test may change; no adapter is loaded afterwards."""
    path = write_adapter(tmp_path / "live", serving.base, Adapter(seed=1))
    yield path
    serving.unload()


def replace_on_disk(live: Path, other: Path) -> None:
    """Put another adapter of the same shape under the same path, by rename, and prove it."""
    Target(live).bring(other / ADAPTER_WEIGHTS, ADAPTER_WEIGHTS)
    assert (live / ADAPTER_WEIGHTS).read_bytes() == (other / ADAPTER_WEIGHTS).read_bytes()


def test_an_adapter_answers_as_the_merged_checkpoint_and_its_base_as_before(serving: Serving, live: Path) -> None:
    assert serving.who(SERVED_MODEL_NAME) == "base"
    assert serving.load(live)[0] == 200
    assert [serving.who(), serving.who(SERVED_MODEL_NAME)] == ["adapter 1", "base"]
    assert serving.unload()[0] == 200
    with pytest.raises(ValueError, match="HTTP 404"):
        serving.who()


@pytest.mark.parametrize(
    ("damage", "said"),
    [(adapter_rank(64), "is greater than max_lora_rank"), (adapter_width(), "")],
    ids=lambda value: value.name if isinstance(value, AdapterFault) else "",
)
def test_a_wrong_adapter_answers_500_and_everybody_else_goes_on(
    serving: Serving, live: Path, tmp_path: Path, damage: AdapterFault, said: str
) -> None:
    assert serving.load(live)[0] == 200
    wrong = write_adapter(tmp_path / "wrong", serving.base, Adapter(seed=2))
    injected = damage.distort(wrong, base=serving.base)
    assert injected.proved, injected.because
    status, text = serving.load(wrong, name="wrong")
    print(f"{damage.name}: {status} {text[:300]}")
    assert status == 500
    assert said in text
    with pytest.raises(ValueError, match="HTTP 404"):  # it is not served
        serving.who("wrong")
    assert [serving.who(), serving.who(SERVED_MODEL_NAME)] == ["adapter 1", "base"]
    assert serving.engine.exit_code() is None


def test_an_adapter_whose_names_match_nothing_is_served_as_its_base(serving: Serving, tmp_path: Path) -> None:
    wrong = write_adapter(tmp_path / "wrong", serving.base, Adapter(seed=2))
    assert adapter_prefix().distort(wrong, base=serving.base).proved
    try:
        assert serving.load(wrong, name="wrong")[0] == 200
        assert serving.who("wrong") == "base"
    finally:
        serving.unload("wrong")


def test_replaced_on_disk_and_not_refreshed_the_old_adapter_answers(serving: Serving, live: Path) -> None:
    assert serving.load(live)[0] == 200
    assert serving.who() == "adapter 1"
    replace_on_disk(live, serving.adapters["adapter 2"])
    assert serving.who() == "adapter 1"
    status, text = serving.load(live)
    assert (status, "has already been loaded" in text) == (400, True)
    assert serving.who() == "adapter 1"
    assert serving.load(live, in_place=True)[0] == 200
    assert serving.who() == "adapter 2"


def test_once_loaded_in_place_an_adapter_follows_the_disk(serving: Serving, live: Path) -> None:
    """The flag stays with the name: every request that brings the adapter in reads the files again."""
    assert serving.load(live)[0] == 200
    assert serving.load(live, in_place=True)[0] == 200
    assert serving.who() == "adapter 1"
    replace_on_disk(live, serving.adapters["adapter 3"])
    assert serving.who() == "adapter 3"  # nobody asked for it


def test_kv_of_the_old_adapter_is_used_after_a_refresh(serving: Serving, live: Path) -> None:
    """The prefix cache knows an adapter by name and path, and not by what is in it."""
    prompt = deep_prompt(512, seed=1, length=300)

    def steps(**more: str):  # type: ignore[no-untyped-def]
        return decode(serving.api, NAME, prompt, max_tokens=4, **more)

    assert serving.load(live)[0] == 200
    steps()
    replace_on_disk(live, serving.adapters["adapter 2"])
    assert serving.unload()[0] == 200
    assert serving.load(live)[0] == 200
    assert serving.who() == "adapter 2"
    stale, cold = steps(), steps(cache_salt="of its own")
    difference = decoded_difference(cold.tokens, cold.logprobs, cold.margins, stale, tolerance=0.02)
    print(f"stale KV of an adapter: difference {difference:.3g}")
    assert difference > 0.02
