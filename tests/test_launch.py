"""Sweeps: the same runs however they are executed, retried, interrupted or lost."""

from __future__ import annotations

import csv
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from unmoved import launch
from unmoved.cli import parse_config
from unmoved.config import Config, make_config
from unmoved.errors import UserError
from unmoved.experiments import Selection, runs_of
from unmoved.launch import Run, SweepArgs, command, shard, supervise, sweep
from unmoved.log import read_rows
from unmoved.report import ReportArgs, report
from unmoved.status import look, status

TINY = ["--action-repeat", "2", "--image-size", "24", "--batch-size", "4", "--filters", "4", "--feature-dim", "8",
        "--hidden-dim", "16", "--capacity", "200", "--random-steps", "20", "--eval-every", "200", "--eval-workers", "1",
        "--eval-episodes", "2", "--log-every", "10", "--checkpoint-every", "60", "--device", "cpu"]  # fmt: skip


def arguments(runs: Path, **changes: Any) -> SweepArgs:
    small = SweepArgs("ablation", ("toy_reach",), ("rad", "ours"), (1,), 400, "cpu", runs)
    return replace(small, **changes)


def configs(runs: Path, **changes: Any) -> list[Config]:
    return runs_of(arguments(runs, **changes), TINY)


def rows(folder: Path) -> list[list[dict[str, Any]]]:
    """Without the times."""
    return [
        [{k: v for k, v in row.items() if k != "seconds"} for row in read_rows(folder / f"{name}.jsonl")]
        for name in ("train", "eval")
    ]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both runs, trained here at the same time."""
    runs = tmp_path_factory.mktemp("swept") / "runs"
    assert sweep(arguments(runs, jobs=2), TINY) == 0
    return runs


def test_commands_make_the_configuration() -> None:
    for name in ("target_augmentation", "ddpg", "components"):
        for config in runs_of(Selection(name, seeds=(2,)), ["--lag", "1", "--no-compile", "--videos", "/some dir"]):
            assert parse_config("train", command(config)[4:]) == config
    odd = make_config("toy_exit", preset="cpu", camera=1, strides=(2, 1), eval_backgrounds=("train",), lr=3e-5)
    assert parse_config("train", command(odd)[4:]) == odd


def test_finished_runs_are_skipped(swept: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(launch, "begin", lambda *a: pytest.fail("started again"))
    assert sweep(arguments(swept), TINY) == 0
    assert "2 of them finished before" in capsys.readouterr().out
    assert status(swept)
    assert "2 runs: 2 finished" in capsys.readouterr().out
    for config in configs(swept):
        assert [r["frames"] for r in read_rows(config.folder / "eval.jsonl")] == [0, 200, 400]
        assert "400 frames" in (config.folder / "log.txt").read_text()


def test_from_command_to_report(swept: Path, tmp_path: Path) -> None:
    page = report(ReportArgs(swept, tmp_path))
    assert page.read_text().count("<img ") == len(list((tmp_path / "figures").glob("*.svg"))) >= 4
    with (tmp_path / "tables/runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        last = read_rows(swept / "cpu/toy_reach" / row["method"] / row["seed"] / "eval.jsonl")[-1]
        assert row["last return"] == f"{last['return_mean']:.1f}" and row["frames"] == "400"
    assert [row["method"] for row in rows] == ["rad", "ours"]


@pytest.mark.slow
def test_an_interrupted_sweep_continues(swept: Path, tmp_path: Path) -> None:
    """SIGTERM to the launcher: its runs save, it says so, and the same command ends with the rows of one go."""
    runs = tmp_path / "runs"
    words = ["ablation", "--tasks", "toy_reach", "--methods", "ours", "--seeds", "1", "--frames", "400",
             "--preset", "cpu", "--runs", str(runs), "--", *TINY]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "unmoved.cli", "sweep", *words], stdout=subprocess.PIPE, text=True
    )
    folder = runs / "cpu/toy_reach/ours/1"
    wait_for(lambda: len(read_rows(folder / "train.jsonl")) >= 4, process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "continues" in out
    config = configs(runs)[1]
    assert look(folder, config).name == "interrupted"
    assert sweep(arguments(runs, methods=("ours",)), TINY) == 0
    assert rows(folder) == rows(swept / "cpu/toy_reach/ours/1")


def wait_for(done: Any, process: subprocess.Popen[str] | None = None, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until and (process is None or process.poll() is None), "it never came"
        time.sleep(0.02)


@dataclass
class Scripted:
    """A place whose runs end at once, with exit codes from a list per method; 0 writes the last evaluation."""

    codes: dict[str, list[int]]
    jobs: int = 1
    started: list[Config] = field(default_factory=list)
    most: int = 0
    going: int = 0

    def start(self, config: Config) -> tuple[Config, int]:
        self.started.append(config)
        self.going += 1
        self.most = max(self.most, self.going)
        config.folder.mkdir(parents=True, exist_ok=True)
        (config.folder / "log.txt").write_text("one\ntwo\n")
        return config, self.codes[config.method].pop(0)

    def code(self, handle: tuple[Config, int]) -> int:
        config, code = handle
        self.going -= 1
        if code == 0:
            row = {"frames": config.frames, "steps": config.total_steps, "background": "train", "return_mean": 1.0}
            (config.folder / "eval.jsonl").write_text(json.dumps(row) + "\n")
        return code

    def stop(self, handle: Any) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("codes", "retries", "outcome", "starts"),
    [
        ([0], 0, "finished", 2),
        ([1, 0], 1, "finished", 3),  # a crash is tried again
        ([-9, -1, 0], 2, "finished", 4),  # killed, then its node lost
        ([1, 1], 1, "failed", 3),  # given up; the other goes on
        ([2], 5, "failed", 2),  # bad input stays bad
        ([3], 5, "failed", 2),  # it would diverge again
    ],
)
def test_retries(codes: list[int], retries: int, outcome: str, starts: int, tmp_path: Path, capsys: Any) -> None:
    runs, place = [Run(config) for config in configs(tmp_path)], Scripted({"rad": codes, "ours": [0]})
    supervise(runs, place, retries, poll=0)
    assert [run.outcome for run in runs] == [outcome, "finished"] and len(place.started) == starts and place.most == 1
    if outcome == "failed":
        assert look(runs[0].config.folder, runs[0].config).why == "one\ntwo"
        assert not status(tmp_path) and "one\ntwo" in capsys.readouterr().out
        assert launch.conclude(runs, arguments(tmp_path)) == 1
    else:
        assert launch.conclude(runs, arguments(tmp_path)) == 0


def test_attempts_that_come_further_do_not_count(tmp_path: Path) -> None:
    """Jobs with a time limit: each ends early, with a newer checkpoint than the last."""

    class Limited(Scripted):
        def code(self, handle: tuple[Config, int]) -> int:
            (handle[0].folder / f"checkpoint/{len(self.started):010d}").mkdir(parents=True)
            return super().code(handle)

    runs = [Run(c) for c in configs(tmp_path, methods=("rad",))]
    place = Limited({"rad": [-1, -1, -1, 3]})
    supervise(runs, place, retries=0, poll=0)
    assert len(place.started) == 4 and runs[0].outcome == "failed"


def test_as_many_at_once_as_asked(tmp_path: Path) -> None:
    place = Scripted({"rad": [0] * 3, "ours": [0] * 3}, jobs=3)
    supervise([Run(c) for c in configs(tmp_path, seeds=(1, 2, 3))], place, 0, poll=0)
    assert place.most == 3


def test_runs_of_another_process_are_left_alone(tmp_path: Path) -> None:
    runs, place = [Run(c) for c in configs(tmp_path)], Scripted({"ours": [0]})
    runs[0].config.folder.mkdir(parents=True)
    with (runs[0].config.folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        supervise(runs, place, 0, poll=0)
        assert look(runs[0].config.folder, runs[0].config).name == "running"
    assert [run.outcome for run in runs] == ["elsewhere", "finished"]
    assert launch.conclude(runs, arguments(tmp_path)) == 1


def test_a_run_that_cannot_begin_is_reported(tmp_path: Path, capsys: Any) -> None:
    """For real: bad input is not tried again, and the exit code tells."""
    runs = tmp_path / "runs"
    assert sweep(arguments(runs, methods=("rad",)), [*TINY, "--weak", "shfit"]) == 1
    out = capsys.readouterr().out
    assert "1 failed" in out and "shift" in out and "Traceback" not in out
    assert not status(runs)


def test_longer_goals_continue(swept: Path) -> None:
    config = configs(swept)[0]
    assert look(config.folder, config).name == "finished"
    assert look(config.folder, replace(config, frames=200)).name == "finished"
    assert look(config.folder, replace(config, frames=800)).name == "interrupted"


def test_shards_are_a_partition(tmp_path: Path) -> None:
    every = configs(tmp_path, seeds=(1, 2, 3, 4, 5))
    parts = [shard(every, f"{i}/3") for i in (1, 2, 3)]
    assert sorted(map(len, parts)) == [3, 3, 4]
    assert {c.folder for part in parts for c in part} == {c.folder for c in every}
    for text in ("0/3", "4/3", "1", "a/b", "1/0"):
        with pytest.raises(UserError, match="shard"):
            shard(every, text)


def test_dry_prints_commands(tmp_path: Path, capsys: Any) -> None:
    assert sweep(arguments(tmp_path / "none", dry=True), TINY) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].startswith("unmoved train toy_reach --preset cpu --method rad")
    assert not (tmp_path / "none").exists()


def test_half_written_rows_and_foreign_files(swept: Path, tmp_path: Path, capsys: Any) -> None:
    config = replace(configs(swept)[0], runs=tmp_path)
    config.folder.mkdir(parents=True)
    (config.folder / "config.json").write_text(json.dumps(config.to_json()))
    (config.folder / "train.jsonl").write_text('{"frames": 40, "seconds": 2}\n7\n{"frames": 60, "sec')
    assert look(config.folder, config).frames == 40 and look(config.folder, config).left == pytest.approx(18)
    (tmp_path / "stray").mkdir()
    (tmp_path / "stray/config.json").write_text("{")
    assert status(tmp_path)
    assert "left out" in capsys.readouterr().out
    with pytest.raises(UserError, match="not a folder"):
        status(tmp_path / "nowhere")


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    for changes, hint in (({"ray": "local"}, r"unmoved\[ray\]"), ({"slurm": "gpu"}, r"unmoved\[slurm\]")):
        with pytest.raises(UserError, match=hint):
            sweep(arguments(tmp_path, **changes), TINY)


@pytest.mark.slow
def test_slurm_by_its_local_executor(swept: Path, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    runs = tmp_path / "runs"
    assert sweep(arguments(runs, slurm="local", methods=("rad",)), TINY) == 0
    assert rows(runs / "cpu/toy_reach/rad/1") == rows(swept / "cpu/toy_reach/rad/1")


@pytest.mark.slow
def test_ray_loses_a_node(swept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes, one of them killed while it trains: every run finishes with the rows of one without the fault."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    runs = tmp_path / "runs"
    folder = runs / "cpu/toy_reach/ours/1"
    killed = []

    def kill() -> None:
        wait_for(lambda: len(read_rows(folder / "train.jsonl")) >= 4)
        where = [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU")]
        busy = ray._private.state.available_resources_per_node()
        for node in nodes:
            if node.node_id in where and not busy.get(node.node_id, {}).get("CPU"):
                cluster.remove_node(node, allow_graceful=False)
                killed.append(node.node_id)
                return

    try:
        thread = threading.Thread(target=kill)
        thread.start()
        done = sweep(arguments(runs, ray=cluster.address, cpus=1, methods=("rad", "ours")), TINY)
        thread.join()
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert killed and done == 0
    assert "continuing" in "".join((f / "log.txt").read_text() for f in (folder, runs / "cpu/toy_reach/rad/1"))
    for method in ("rad", "ours"):
        assert rows(runs / "cpu/toy_reach" / method / "1") == rows(swept / "cpu/toy_reach" / method / "1")
