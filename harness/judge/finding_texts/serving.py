"""What happens to an engine while it serves."""

from __future__ import annotations

from harness.judge.finding_texts.text import HEALTH, Text
from harness.judge.moments import Layer

CORE = "$(pgrep -f 'VLLM::EngineCor[e]')"

SERVING: tuple[Text, ...] = (
    Text(
        pattern=r"core_(killed|crashed|aborted).*",
        layers=(Layer.HEALTH,),
        title="The server does not end with an error code after its engine core was killed",
        expected="An exit code other than 0: the server did not end because somebody asked it to.",
        why="It ends with 0, which a supervisor with restart-on-failure, and a Kubernetes Job, take for a success: nobody starts "
        "it anew.",
        reports=("vllm-project/vllm#39863", "kserve/kserve#6259"),
        by_hand=(f"kill -SEGV {CORE}; wait %1; echo $?   # 0",),
    ),
    Text(
        pattern=r".*(frozen|sigstop|stopped_core).*",
        title="`/health` answers 200 while the engine core is stopped and requests hang",
        expected="`/health` fails once the core has not answered for some seconds.",
        why="Requests queue without an answer, and no probe ever takes the server out of rotation.",
        reports=("vllm-project/vllm#39863", "PrimeIntellect-ai/prime-rl#2375", "gonka-ai/gonka#1421"),
        by_hand=(
            f"kill -STOP {CORE}",
            f"{HEALTH}   # 200",
            f"kill -CONT {CORE}",
        ),
    ),
    Text(
        pattern=r"missing_compiler.*",
        title="A missing C++ compiler is found at the first request",
        expected="The server refuses to start: it knows that it will compile.",
        why="It starts, `/health` says 200, and the first completion kills the engine.",
    ),
    Text(
        pattern=r"kernels_of_another_runtime.*",
        title="A compile cache of another runtime is found at the first request",
        expected="Files that cannot be loaded are compiled anew, or the engine refuses to start, as it did before 0.32.0.",
        why="On a CPU the library that asks for vector instructions lies in that cache too. Since it cannot be loaded, the processor is taken "
        "for one without them, and the code that is written for it does not compile: `/health` says 200, and the first completion "
        "kills the engine. Deleting the cache is the remedy, and nothing says so.",
    ),
)
