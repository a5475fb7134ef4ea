"""A loader process: locust around `loader.Loader`, told what to do by its parent.

Started by `harness.load.driver`. It reads commands as JSON lines on its standard input, answers each on its standard
output, and ends at once when the input ends, which it does when the parent dies.
"""

from __future__ import annotations

from gevent import monkey

monkey.patch_all()  # before anything else is imported: a late patch breaks ssl

import argparse  # noqa: E402
import gc  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Mapping  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, ClassVar  # noqa: E402

import flask  # noqa: E402
import gevent  # noqa: E402
from gevent.fileobject import FileObject  # noqa: E402
from locust import User, task  # noqa: E402
from locust.env import Environment  # noqa: E402
from locust.exception import StopUser  # noqa: E402
from locust.html import get_html_report  # noqa: E402
from locust.stats import stats_history  # noqa: E402

from harness.clock import now_ns  # noqa: E402
from harness.load.loader import Loader, OnEnded, end_process  # noqa: E402
from harness.load.plan import LoadPlan  # noqa: E402
from harness.observe.history import Request, RequestResult  # noqa: E402

EXIT_PARENT_GONE = 70


class _Failed(Exception):
    """Tells locust's statistics that a request failed, and how."""


class PlannedArrivals(User):
    """The one locust user: the dispatcher."""

    fixed_count = 1
    loader: ClassVar[Loader]

    @task
    def follow(self) -> None:
        """Follow the plan to its end."""
        try:
            self.loader.follow_plan()
        except Exception:
            # Locust would call the task again, and so send the plan twice.
            traceback.print_exc()
            os._exit(1)
        raise StopUser


class Commands:
    """Obeys the parent."""

    def __init__(self, loader: Loader, answers_fd: int) -> None:
        self._loader = loader
        self._answers_fd = answers_fd

    def say(self, **message: Any) -> None:
        """Tell the parent something."""
        os.write(self._answers_fd, (json.dumps(message) + "\n").encode())

    def obey(self) -> None:
        """Do what the parent says until it goes away, then end this process at once."""
        with FileObject(sys.stdin.fileno(), "rb", close=False) as lines:
            for line in lines:
                command = json.loads(line)
                self.say(ack=command["number"], **self._do(command))
        os._exit(EXIT_PARENT_GONE)

    def _do(self, command: Mapping[str, Any]) -> dict[str, Any]:
        match command["do"]:
            case "start":
                self._loader.begin(command["start_ns"])
            case "admit":
                self._loader.admit(command["endpoint"], command["incarnation"])
            case "stop":
                return {"stop_ns": self._loader.stop()}
        return {"at_ns": now_ns()}


def main() -> None:
    """Run the plan that the parent wrote into the directory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--cpus", default="")
    parser.add_argument("--loader", type=int, required=True)
    parser.add_argument("--loaders", type=int, required=True)
    parser.add_argument("--web-ui", action="store_true")
    options = parser.parse_args()
    del sys.argv[1:]  # locust's page reads them as its own
    answers_fd = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints must not look like an answer
    if options.cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in options.cpus.split(",")})
    environment = Environment(user_classes=[PlannedArrivals])
    runner = environment.create_local_runner()
    loader = Loader(
        LoadPlan.load(options.directory / "plan.json"),
        number=options.loader,
        loaders=options.loaders,
        model=options.model,
        api_key=os.environ.pop("VLLM_API_KEY", ""),
        directory=options.directory,
        on_ended=_statistics(environment),
    )
    PlannedArrivals.loader = loader
    gevent.spawn(stats_history, runner)
    commands = Commands(loader, answers_fd)
    gevent.spawn(commands.obey).link_exception(end_process)
    runner.start(1, spawn_rate=1)
    url = serve_web_ui(environment) if options.web_ui else ""
    gc.collect()
    gc.freeze()  # a collection that walks locust's modules takes longer than a token gap
    commands.say(ready=url)
    loader.finished.wait()
    report = loader.report()
    runner.quit()
    page: str = get_html_report(environment)  # type: ignore[no-untyped-call]
    (options.directory / f"locust-{options.loader}.html").write_text(page, encoding="utf-8")
    commands.say(ended=report)


def serve_web_ui(environment: Environment) -> str:
    """Serve locust's own page on a free port of the loopback device and return its address.

    It can only be looked at: whoever could start or stop a test there would change what is measured.
    """
    web_ui = environment.create_web_ui(host="127.0.0.1", port=0, delayed_start=True)
    assert web_ui.app is not None
    web_ui.app.before_request(_refuse_changes)
    web_ui.start()  # type: ignore[no-untyped-call]
    while web_ui.server is None or not web_ui.server.started:
        gevent.sleep(0.01)
    return f"http://127.0.0.1:{web_ui.server.server_port}"


def _statistics(environment: Environment) -> OnEnded:
    """Return what fills locust's own statistics, which are for people; it wants milliseconds."""

    def note(request: Request, received_bytes: int) -> None:
        environment.events.request.fire(  # type: ignore[no-untyped-call]
            request_type="POST",
            name=request.kind,
            response_time=(request.ended_ns - request.planned_ns) / 1e6,
            response_length=received_bytes,
            exception=None if request.result is RequestResult.OK else _Failed(request.result),
            context={"id": request.id},
        )

    return note


def _refuse_changes() -> tuple[str, int] | None:
    return None if flask.request.method in ("GET", "HEAD") else ("this page is for looking only", 405)


if __name__ == "__main__":
    main()
