"""Load as the command line is told about it: what cannot be kept is refused by name, and locust's page is there to look at."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tests.suites import RUN_LIMIT_S, start, write_suite

URL = re.compile(r"locust's own page, to look at while load runs: (http://127\.0\.0\.1:\d+)")


def suite_with(directory: Path, load: str) -> None:
    """Write a suite whose scenario has this load."""
    test = write_suite(directory) / "test_widened.py"
    told = re.sub(r"load=load\.steady\(.*\),\n", f"load={load},\n", test.read_text())
    assert load in told
    test.write_text(told)


@pytest.mark.parametrize(
    ("load", "arguments", "said"),
    [
        (
            "load.steady(rate_rps=8.0)",
            ["--rate-rps", "600"],
            r"harness: the plan cannot be kept: rate_rps = 600 means [\d,]+ requests and [\d,]+ events per second",
        ),
        (
            "load.ramp([(0.0, 0.0), (9.0, 0.0)])",
            [],
            r"harness: rollouts/test_widened\.py: zero arrivals: no point of the ramp",
        ),
        ("load.steady(rate_rps=0.000001)", [], r"harness: zero arrivals: no request arrives within horizon_s = 600 s"),
        (
            "load.trace('rollouts/trace.jsonl')",
            [],
            r'harness: rollouts/test_widened\.py: trace "rollouts/trace\.jsonl" line 2: times decrease, 1 s comes after 2 s',
        ),
    ],
    ids=["rate beyond the loaders", "zero arrivals", "zero arrivals by chance", "trace with decreasing times"],
)
def test_load_that_cannot_be_is_refused_before_it_starts(
    tmp_path: Path, load: str, arguments: list[str], said: str
) -> None:
    suite_with(tmp_path, load)
    (tmp_path / "rollouts" / "trace.jsonl").write_text('{"at_s": 2}\n{"at_s": 1}\n')

    with start(
        ["run", "rollouts", "--engine", "reference", *arguments], scratch=tmp_path / "scratch", cwd=tmp_path
    ) as process:
        output, _ = process.communicate(timeout=RUN_LIMIT_S)

    assert process.returncode == 3, output
    assert re.search(f"^{said}", output, re.MULTILINE), output
    assert "Traceback" not in output
    assert not list(tmp_path.glob("results/*/scenarios/*")), "something was started"


def test_the_page_of_locust_is_served_while_load_runs_and_only_then(tmp_path: Path) -> None:
    write_suite(tmp_path)
    arguments = ["run", "rollouts", "--engine", "reference", "--locust-web-ui", "-k", "not unguarded"]
    urls = []
    with start(arguments, scratch=tmp_path / "scratch", cwd=tmp_path) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if (found := URL.search(line)) is not None:
                urls.append(found.group(1))
                assert b"<title>Locust" in urlopen(urls[0], timeout=10).read()
                with pytest.raises(HTTPError, match="405"):
                    urlopen(f"{urls[0]}/stop", data=b"", timeout=10)
        process.wait(RUN_LIMIT_S)

    assert len(urls) == 1
    assert process.returncode == 0
    with pytest.raises(OSError, match="refused"):
        urlopen(urls[0], timeout=10)
