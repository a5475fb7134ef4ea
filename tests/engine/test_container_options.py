from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from harness.engine.container_options import (
    CHECKPOINTS,
    PLUGINS,
    ContainerOptions,
    container_options,
    container_user,
    is_readable_by_all,
)
from harness.engine.engine import EngineSite
from harness.engine.launch import Launch, WeightCache
from harness.errors import UsageError
from harness.label import LABEL_KEY

KEY = "sk-not-to-be-seen"


@pytest.fixture
def site(tmp_path: Path) -> EngineSite:
    return EngineSite(
        run_label="r1",
        log_directory=tmp_path / "logs",
        work_directory=tmp_path,
        api_key=KEY,
        engine_cpus=(1, 3),
        memory_limit_bytes=5 * 1024**3,
    )


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    return Launch(checkpoint_root=tmp_path / "checkpoints", checkpoint_name="live")


def options_of(launch: Launch, site: EngineSite, **changes: object) -> ContainerOptions:
    return container_options(launch, site, **{"image": "i", "incarnation": "a", "network": "n", **changes})


def test_the_port_is_random_and_on_loopback_only(launch: Launch, site: EngineSite) -> None:
    assert options_of(launch, site).ports == {"8000/tcp": ("127.0.0.1",)}


def test_the_api_key_travels_by_environment_and_shows_nowhere_else(launch: Launch, site: EngineSite) -> None:
    options = options_of(launch, site)
    assert options.environment["VLLM_API_KEY"] == KEY
    assert KEY not in " ".join(options.command)
    assert KEY not in repr(options)
    assert KEY not in repr(options.as_docker())


def test_the_launch_cannot_replace_the_api_key(launch: Launch, site: EngineSite) -> None:
    changed = replace(launch, environment=(("VLLM_API_KEY", "other"), ("VLLM_LOGGING_LEVEL", "DEBUG")))
    environment = options_of(changed, site).environment
    assert environment["VLLM_API_KEY"] == KEY
    assert environment["VLLM_LOGGING_LEVEL"] == "DEBUG"


def test_powers_and_resources_are_limited(launch: Launch, site: EngineSite) -> None:
    asked = options_of(launch, site).as_docker()
    assert asked["cap_drop"] == ["ALL"]
    assert asked["security_opt"] == ["no-new-privileges"]
    assert asked["cpuset_cpus"] == "1,3"
    assert asked["mem_limit"] == asked["memswap_limit"] == 5 * 1024**3
    assert asked["pids_limit"] > 0
    assert asked["labels"][LABEL_KEY] == "r1"
    assert "privileged" not in asked
    assert "network_mode" not in asked


def test_without_chosen_processors_none_are_pinned(launch: Launch, site: EngineSite) -> None:
    assert "cpuset_cpus" not in options_of(launch, replace(site, engine_cpus=())).as_docker()


def test_checkpoints_are_mounted_whole_and_read_only(launch: Launch, site: EngineSite) -> None:
    options = options_of(launch, site)
    (mount,) = options.as_docker()["mounts"]
    assert (mount["Source"], mount["Target"], mount["ReadOnly"]) == (str(launch.checkpoint_root), CHECKPOINTS, True)
    assert options.command[0] == f"{CHECKPOINTS}/live"


@pytest.mark.parametrize("name", ["../etc", "/etc", "a/../../b", ""])
def test_a_checkpoint_name_stays_below_its_root(launch: Launch, site: EngineSite, name: str) -> None:
    with pytest.raises(UsageError, match="below its root"):
        options_of(replace(launch, checkpoint_name=name), site)


def test_the_weight_cache_is_the_only_writable_mount(launch: Launch, site: EngineSite, tmp_path: Path) -> None:
    cached = replace(
        launch, weight_cache=WeightCache(directory=tmp_path, key="content"), environment=(("PYTHONPATH", "/mine"),)
    )
    options = options_of(cached, site)
    writable = [(m.source, m.target) for m in options.mounts if not m.is_read_only]
    assert writable == [(tmp_path, "/dev/shm/vllm_weight_cache")]
    assert options.environment["VLLM_WEIGHT_CACHE_PATH"] == "/dev/shm/vllm_weight_cache"
    assert options.environment["VLLM_WEIGHT_CACHE_KEY"] == "content"
    assert options.environment["PYTHONPATH"] == f"{PLUGINS}:/mine"
    assert PLUGINS in [m.target for m in options.mounts]


def test_without_a_weight_cache_there_is_no_plugin(launch: Launch, site: EngineSite) -> None:
    options = options_of(launch, site)
    assert "PYTHONPATH" not in options.environment
    assert not any(m.target == PLUGINS for m in options.mounts)


def test_a_cpu_image_compiles_nothing_and_takes_little_memory(launch: Launch, site: EngineSite) -> None:
    options = options_of(launch, site)
    assert options.command[-1] == "--enforce-eager"
    assert options.environment["TORCHDYNAMO_DISABLE"] == "1"
    assert options.environment["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_eager_mode_can_be_refused(launch: Launch, site: EngineSite) -> None:
    compiled = replace(launch, extra_arguments=("--no-enforce-eager",))
    assert "--enforce-eager" not in options_of(compiled, site).command


def test_a_gpu_image_is_left_as_fast_as_it_is(launch: Launch, site: EngineSite) -> None:
    options = options_of(launch, site, gpus=("0",))
    assert "--enforce-eager" not in options.command
    assert "TORCHDYNAMO_DISABLE" not in options.environment
    assert "VLLM_CPU_KVCACHE_SPACE" not in options.environment


@pytest.mark.parametrize(
    ("gpus", "count", "ids"), [(("0", "GPU-5"), None, ["0", "GPU-5"]), (2, 2, None), (-1, -1, None)]
)
def test_gpus_are_asked_for_by_id_or_count(
    launch: Launch, site: EngineSite, gpus: tuple[str, ...] | int, count: int | None, ids: list[str] | None
) -> None:
    (request,) = options_of(launch, site, gpus=gpus).as_docker()["device_requests"]
    assert request["Count"] == (count or 0)
    assert request["DeviceIDs"] == (ids or [])
    assert request["Capabilities"] == [["gpu"]]


@pytest.mark.parametrize("gpus", [(), 0])
def test_no_gpu_is_asked_for_unless_named(launch: Launch, site: EngineSite, gpus: tuple[str, ...] | int) -> None:
    assert "device_requests" not in options_of(launch, site, gpus=gpus).as_docker()


def test_a_person_lends_the_container_their_ids(tmp_path: Path) -> None:
    assert container_user(tmp_path, uid=1234, gid=99) == "1234:99"


def test_root_keeps_its_ids_unless_a_file_is_closed_to_others(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir(mode=0o755)
    weights = root / "model.safetensors"
    weights.write_bytes(b"")
    weights.chmod(0o644)
    assert is_readable_by_all(root)
    assert container_user(root, uid=0, gid=0) == ""
    weights.chmod(0o600)
    assert not is_readable_by_all(root)
    assert container_user(root, uid=0, gid=0) == f"{os.getuid()}:{root.stat().st_gid}"


def test_a_closed_directory_and_a_closed_link_target_are_seen_and_a_dangling_link_is_not(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    (root / "old").mkdir(parents=True)
    (root / "live").symlink_to("gone")
    assert is_readable_by_all(root)
    (root / "old").chmod(0o700)
    assert not is_readable_by_all(root)


def test_a_compile_cache_is_mounted_under_its_own_name_and_makes_the_engine_compile(
    launch: Launch, site: EngineSite, tmp_path: Path
) -> None:
    eager = options_of(launch, site)
    compiling = options_of(replace(launch, compile_cache=tmp_path / "cache-moved"), site)

    assert "--enforce-eager" in eager.command
    assert eager.environment["TORCHDYNAMO_DISABLE"] == "1"
    assert "VLLM_CACHE_ROOT" not in eager.environment
    assert "--enforce-eager" not in compiling.command
    assert "TORCHDYNAMO_DISABLE" not in compiling.environment
    place = compiling.environment["VLLM_CACHE_ROOT"]
    assert place.endswith("/cache-moved")
    (mount,) = [mount for mount in compiling.mounts if mount.target == place]
    assert mount.source == tmp_path / "cache-moved"
    assert not mount.is_read_only


def test_ranks_get_the_processors_of_the_engine_and_a_launch_may_choose_others(
    launch: Launch, site: EngineSite
) -> None:
    split = replace(launch, extra_arguments=("--tensor-parallel-size", "2"))
    chosen = replace(split, environment=(("VLLM_CPU_OMP_THREADS_BIND", "nobind"),))

    assert "VLLM_CPU_OMP_THREADS_BIND" not in options_of(launch, site).environment
    assert options_of(split, site).environment["VLLM_CPU_OMP_THREADS_BIND"] == "1|3"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in options_of(split, site, gpus=2).environment
    assert options_of(chosen, site).environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
