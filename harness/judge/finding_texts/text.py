"""What is said of a fault that an engine serves."""

from __future__ import annotations

import re
from dataclasses import dataclass

from harness.judge.moments import Layer

HOLDER = "vLLM"  # who could do something about it
OPERATOR = "operator"
# Shell lines that texts of more than one family have; "tiny" is what `vllm serve` serves.
ASK = """curl -s http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
  -d '{"model": "tiny", "prompt": [5, 17, 42, 99, 7, 300, 12, 8], "max_tokens": 4, "temperature": 0, "prompt_logprobs": 0}'"""
HEALTH = "curl -s -o /dev/null -w '%{http_code}\\n' http://127.0.0.1:8000/health"


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """What is said of the scenarios whose whole name matches a pattern."""

    pattern: str
    title: str
    expected: str
    why: str
    reports: tuple[str, ...] = ()
    by_hand: tuple[
        str, ...
    ] = ()  # shell lines after the server is up, where a restart on a damaged copy does not show it
    serve: str = ""  # environment of `vllm serve`, such as "VLLM_SERVER_DEV_MODE=1"
    arguments: str = ""  # of `vllm serve`, as a shell reads them
    layers: tuple[Layer, ...] = ()  # where noticing there is a finding too, though it is not late in general
    when: str = ""  # only where the engine's words match this
    whose: str = HOLDER

    def fits(self, scenario: str, seen: str) -> bool:
        """Say whether this is what to say about a scenario in which that was seen."""
        return re.fullmatch(self.pattern, scenario) is not None and re.search(self.when, seen) is not None
