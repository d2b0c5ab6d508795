"""The doctor: each check on a machine where it holds and on one where it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from unmoved import cli, doctor
from unmoved.config import make_config
from unmoved.doctor import Check
from unmoved.replay import Replay

SOFT = {"backend": "egl", "vendor": "Mesa", "renderer": "llvmpipe (LLVM 15)", "ms": 20.0, "cuda_device": None}
HARD = {"backend": "egl", "vendor": "NVIDIA Corporation", "renderer": "NVIDIA H200", "ms": 0.7, "cuda_device": 0}


def statuses(checks: Any) -> list[str]:
    return [check.status for check in checks]


def test_the_replays_size_is_the_replays() -> None:
    config = make_config("walker_walk", capacity=1_000)
    assert doctor.replay_bytes(config) == Replay(1_000, (9, 84, 84), 6).nbytes
    # 100,000 frames of 3 x 84 x 84 bytes and a little more
    assert doctor.replay_bytes(make_config("walker_walk")) == pytest.approx(100_000 * 3 * 84 * 84, rel=0.01)


def test_memory_against_need() -> None:
    gigabyte = 10**9
    assert statuses([doctor.fits("m", need * gigabyte, 10 * gigabyte, "", "less") for need in (5, 9, 11)]) == [
        "ok",
        "warning",
        "failed",
    ]


def test_versions_outside_their_window_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["torch>=2.11", "mujoco<4,>=3.17", "nowhere-to-be-found", "ray; extra == 'ray'"]
    real = metadata.version
    monkeypatch.setattr(metadata, "requires", lambda name: wanted)
    monkeypatch.setattr(
        metadata, "version", lambda name: {"torch": "2.13.0+cpu", "mujoco": "4.0.1"}.get(name) or real(name)
    )
    (check,) = doctor.packages()
    assert check.status == "failed"
    assert "mujoco 4.0.1 is not <4,>=3.17" in check.found and "nowhere-to-be-found is missing" in check.found
    assert "torch" not in check.found and "ray" not in check.found
    wanted[1:3] = []
    assert list(doctor.packages()) == [Check("packages", "ok", "torch 2.13.0+cpu")]


def test_software_rendering_is_a_fault_only_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = 0
    monkeypatch.setattr(doctor, "gpus", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert statuses(doctor.opengl(SOFT)) == ["ok"]
    gpus = 2
    (check,) = doctor.opengl(SOFT)
    assert check.status == "warning" and "software: llvmpipe" in check.found
    gl, egl = doctor.opengl(HARD)
    assert gl.status == "ok" and "hardware: NVIDIA H200 (NVIDIA Corporation)" in gl.found
    assert egl.status == "warning" and "CUDA device 0 renders, 1 trains" in egl.found
    assert statuses(doctor.opengl(HARD | {"cuda_device": 1})) == ["ok", "ok"]
    (check,) = doctor.opengl({"error": "install it"})
    assert (check.status, check.advice) == ("failed", "install it")


def test_a_real_context_is_read() -> None:
    gl = doctor.probe_gl()
    if "error" in gl:
        pytest.skip(gl["error"])
    assert gl["renderer"] and gl["vendor"] and gl["ms"] > 0 and gl["backend"] in ("egl", "osmesa", "glfw")


@pytest.mark.parametrize(
    ("child", "word"),
    [("import os; os.abort()", "crashed"), ("import time; time.sleep(9)", "hangs"), ("print('chatter')", "crashed")],
)
def test_a_driver_that_breaks_is_reported(child: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run
    monkeypatch.setattr(doctor, "GL_SECONDS", 0.5)
    monkeypatch.setattr(subprocess, "run", lambda words, **kw: run([sys.executable, "-c", child], **kw))
    assert word in doctor.probe_gl()["error"]


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config("toy_reach", preset="cpu", runs=tmp_path / "a" / "b")
    assert statuses(doctor.folder(config)) == ["ok", "ok"] and list(tmp_path.iterdir()) == []
    blocked = make_config("toy_reach", preset="cpu", runs="/proc/runs")
    (check,) = doctor.folder(blocked)
    assert check.status == "failed" and "/proc cannot be written" in check.found
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10}))
    assert statuses(doctor.folder(config)) == ["ok", "failed"]


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 50 kB\n"}
    monkeypatch.setattr(Path, "read_text", lambda path: files[str(path)])
    assert doctor.free_memory() == 50 * 1024
    group = "/sys/fs/cgroup/memory."
    files |= {f"{group}max": "40000\n", f"{group}current": "30000\n", f"{group}stat": "anon 1\ninactive_file 5000\n"}
    assert doctor.free_memory() == 15_000
    files[f"{group}max"] = "max\n"
    assert doctor.free_memory() == 50 * 1024


def test_a_broken_check_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: Any) -> Any:
        raise OSError("libcudart.so: cannot open\nshared object file")

    monkeypatch.setattr(doctor, "probe_gl", lambda: SOFT)
    monkeypatch.setattr(doctor, "device", broken)
    checks = {check.name: check for check in doctor.examine(make_config("toy_reach", preset="cpu", runs=tmp_path))}
    assert checks["device"].found == "OSError: libcudart.so: cannot open shared object file"
    assert checks["device"].status == "failed" and {"OpenGL", "memory", "runs", "cores"} <= checks.keys()


def test_json_and_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    checks = [Check("a", "ok", "fine"), Check("b", "warning", "[so] so", "do this")]
    monkeypatch.setattr(doctor, "examine", lambda config: iter(checks))
    cli.main(["doctor", "--json"])
    assert [row["status"] for row in json.loads(capsys.readouterr().out)] == ["ok", "warning"]
    checks.append(Check("c", "failed", "no"))
    with pytest.raises(SystemExit) as stop:
        cli.main(["doctor"])
    text = capsys.readouterr().out
    assert stop.value.code == 1 and "[so] so" in text and "-> do this" in text


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    for words, sentence in ((["--task", "CarRacing-v3"], "`unmoved tasks` lists"), (["--preset", "drqq"], "drq")):
        with pytest.raises(SystemExit) as stop:
            cli.main(["doctor", *words])
        assert stop.value.code == 2 and sentence in capsys.readouterr().err


def test_without_torch_it_still_reports(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch is broken')\n")
    words = [sys.executable, "-m", "unmoved.cli", "doctor", "--task", "toy_reach", "--preset", "cpu", "--json"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=tmp_path)
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert done.returncode == 1 and "libtorch is broken" in rows["device"]["found"] and rows["cores"]["found"]
