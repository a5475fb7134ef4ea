"""Host samples from a made-up /proc."""

from __future__ import annotations

import pytest

from harness.observe.host import HostSampler


@pytest.fixture
def proc(tmp_path):
    (tmp_path / "pressure").mkdir()
    (tmp_path / "stat").write_text("cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 1 1 1\n")
    (tmp_path / "meminfo").write_text("MemTotal:  100 kB\nMemAvailable:     2048 kB\n")
    for name, value in (("cpu", "1.50"), ("io", "0.25"), ("memory", "12.00")):
        text = f"some avg10={value} avg60=9.00 avg300=9.00 total=9\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=0\n"
        (tmp_path / "pressure" / name).write_text(text)
    return tmp_path


def test_ratios_are_of_the_time_between_two_samples(proc) -> None:
    sampler = HostSampler(proc)
    (proc / "stat").write_text("cpu  130 10 60 880 70 0 0 50 7 7\n")  # 200 ticks: 80 idle, 20 waiting, 50 stolen
    sample = sampler.sample()
    assert sample.cpu_busy_ratio == 0.5
    assert sample.steal_ratio == 0.25
    assert sample.memory_available_bytes == 2048 * 1024
    assert (sample.pressure_cpu_avg10, sample.pressure_io_avg10, sample.pressure_memory_avg10) == (1.5, 0.25, 12.0)


def test_no_time_between_two_samples_gives_no_ratio(proc) -> None:
    assert HostSampler(proc).sample().cpu_busy_ratio is None


@pytest.mark.parametrize("text", ["", "cpu  a b c", "cpu 1 2 3", "intr 1 2 3 4 5 6 7 8 9", "\x00\xff"])
def test_an_odd_stat_file_gives_no_ratio(proc, text) -> None:
    sampler = HostSampler(proc)
    (proc / "stat").write_text(text)
    assert sampler.sample().cpu_busy_ratio is None


def test_absent_files_give_none(tmp_path) -> None:
    sample = HostSampler(tmp_path / "nowhere").sample()
    assert {getattr(sample, name) for name in sample.__slots__} == {None}


def test_counters_that_run_backwards_give_no_ratio_outside_0_and_1(proc) -> None:
    sampler = HostSampler(proc)
    (proc / "stat").write_text("cpu  10 0 5 1200 50 0 0 0 0 0\n")
    assert sampler.sample().cpu_busy_ratio == 0.0


def test_this_machine_can_be_sampled() -> None:
    sample = HostSampler().sample()
    assert sample.memory_available_bytes is None or sample.memory_available_bytes > 0
