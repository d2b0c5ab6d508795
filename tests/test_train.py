"""Runs: the same twice, the same after a kill, and what happens when something goes wrong."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from unmoved import (
    Bellman,
    Blur,
    Improve,
    Method,
    PolicyKL,
    Shift,
    TangentProp,
    Target,
    View,
    checkpoint,
    load_agent,
)
from unmoved.compile import Updater
from unmoved.config import Config, make_config
from unmoved.errors import Diverged, UserError
from unmoved.evaluate import EVALUATE, Evaluator, deterministic, uniform_random
from unmoved.log import read_rows
from unmoved.train import Trainer, train

TINY: dict[str, Any] = {
    "preset": "cpu", "method": "ours", "frames": 400, "action_repeat": 2, "image_size": 24, "batch_size": 4,
    "filters": 4, "feature_dim": 8, "hidden_dim": 16, "capacity": 120, "random_steps": 20, "eval_every": 100,
    "eval_episodes": 2, "log_every": 10, "checkpoint_every": 60, "device": "cpu",
}  # fmt: skip


def config(runs: Path, task: str = "toy_reach", **changes: Any) -> Config:
    return make_config(task, runs=runs, **(TINY | changes))


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """Without the times."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in read_rows(folder / name)]


def same(a: Path, b: Path) -> None:
    for name in ("train.jsonl", "eval.jsonl"):
        assert rows(a, name) == rows(b, name), name


def command(c: Config) -> list[str]:
    """The command line that makes this configuration."""
    words = [sys.executable, "-m", "unmoved.cli", "train", c.task, "--preset", c.preset, "--method", c.method]
    for key in (*TINY, "runs"):
        if key in ("preset", "method"):
            continue
        words += [f"--{key.replace('_', '-')}", str(getattr(c, key))]
    return words


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    return train(config(tmp_path_factory.mktemp("whole")))


def test_rows_say_what_they_must(whole: Path) -> None:
    evaluations = read_rows(whole / "eval.jsonl")
    assert [r["frames"] for r in evaluations] == [0, 100, 200, 300, 400]
    assert set(evaluations[0]) >= {"frames", "steps", "seconds", "background", "episodes", "return_mean", "return_std"}
    assert len(evaluations[0]["returns"]) == 2 and evaluations[1]["steps"] == 50
    last = read_rows(whole / "train.jsonl")[-1]
    assert last["frames"] == 400 and last["steps"] == 200 and last["updates"] == 180
    assert {"critic_loss", "bellman_nu", "tangent_nu", "kl_author", "kl_exact", "alpha", "q_mean"} <= set(last)
    assert json.loads((whole / "machine.json").read_text())["torch"] == torch.__version__


def test_the_same_seed_gives_the_same_rows(whole: Path, tmp_path: Path) -> None:
    same(whole, train(config(tmp_path)))


def test_another_seed_does_not(whole: Path, tmp_path: Path) -> None:
    other = train(config(tmp_path, seed=2, frames=100))
    assert rows(other, "eval.jsonl")[0] != rows(whole, "eval.jsonl")[0]


@pytest.mark.parametrize("task", ["toy_reach", "toy_exit", "cartpole_swingup"])
def test_a_killed_run_continues_exactly(task: str, tmp_path: Path) -> None:
    """SIGKILL at random moments, then the same command: the rows of an uninterrupted run, bit for bit."""
    frames = {"toy_reach": 400, "toy_exit": 300, "cartpole_swingup": 240}[task]
    reference = config(tmp_path / "a", task, frames=frames, eval_every=120, eval_episodes=1)
    train(reference)
    c = config(tmp_path / "b", task, frames=frames, eval_every=120, eval_episodes=1)
    rng, total = random.Random(task), len(rows(reference.folder, "train.jsonl"))
    for _ in range(2):
        process = subprocess.Popen(command(c), stdout=subprocess.DEVNULL, start_new_session=True)
        at = rng.randint(2, total - 2)  # somewhere in the run, at whatever instant the file has grown so far
        while len(rows(c.folder, "train.jsonl")) < at:
            assert process.poll() is None
            time.sleep(rng.uniform(0, 0.05))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert subprocess.run(command(c), stdout=subprocess.DEVNULL).returncode == 0
    same(reference.folder, c.folder)


def test_a_stop_at_any_step_continues_exactly(whole: Path, tmp_path: Path) -> None:
    """Stopped in the middle of an episode, of a log interval, of the random steps."""
    for steps in (7, 63, 151):
        trainer = Trainer(config(tmp_path))
        if trainer.steps < steps:
            original = trainer.observe

            def observe(action: Any, trainer: Trainer = trainer, original: Any = original, at: int = steps) -> None:
                original(action)
                trainer.stop = trainer.steps >= at

            trainer.observe = observe  # type: ignore[method-assign]
        trainer.run()
        assert checkpoint.listed(trainer.folder)[0].name == f"{steps:010d}"
    same(whole, train(config(tmp_path)))


def test_sigterm_leaves_a_checkpoint(tmp_path: Path) -> None:
    c = config(tmp_path, frames=1_000_000, checkpoint_every=0)
    process = subprocess.Popen(command(c), stdout=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while not (c.folder / "train.jsonl").is_file() or len(read_rows(c.folder / "train.jsonl")) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGTERM)  # the environment's process gets it too
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "continues" in output
    assert len(checkpoint.listed(c.folder)) == 1


def test_a_finished_run_can_be_extended(whole: Path, tmp_path: Path) -> None:
    folder = train(config(tmp_path, frames=200))
    before = rows(folder, "eval.jsonl")
    assert train(config(tmp_path, frames=200)) == folder and rows(folder, "eval.jsonl") == before
    same(whole, train(config(tmp_path, frames=400)))


def test_a_stop_in_the_last_step_still_evaluates(whole: Path, tmp_path: Path) -> None:
    trainer = Trainer(config(tmp_path))
    original = trainer.observe

    def observe(action: Any) -> None:
        original(action)
        trainer.stop = trainer.steps == 200

    trainer.observe = observe  # type: ignore[method-assign]
    trainer.run()
    assert len(rows(trainer.folder, "eval.jsonl")) == 4
    same(whole, train(config(tmp_path)))


@pytest.mark.parametrize("changes", [{"lag": 1}, {"keep_states": True}])
def test_other_modes_continue_exactly_too(changes: dict[str, Any], tmp_path: Path) -> None:
    a = train(config(tmp_path / "a", frames=200, **changes))
    train(config(tmp_path / "b", frames=100, **changes))
    same(a, train(config(tmp_path / "b", frames=200, **changes)))


def test_one_process_at_a_time(tmp_path: Path) -> None:
    trainer = Trainer(config(tmp_path))
    with pytest.raises(UserError, match="another process"):
        Trainer(config(tmp_path))
    trainer.close()


def test_signal_handlers_are_put_back(tmp_path: Path) -> None:
    def mine(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGINT, mine)
    try:
        train(config(tmp_path, frames=60))
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_recipe_of_the_same_name_is_refused(tmp_path: Path) -> None:
    nu = View("nu", Shift())
    mine, other = (Method("mine", Target(nu), (Bellman(nu, w),), (Improve(nu),)) for w in (1.0, 2.0))
    folder = train(config(tmp_path, method="mine", frames=100), mine)
    with pytest.raises(UserError, match="recipe"):
        train(config(tmp_path, method="mine", frames=200), other)
    assert folder.is_dir()


def test_nothing_is_lost_when_no_checkpoint_is_whole(tmp_path: Path) -> None:
    folder = train(config(tmp_path, frames=200))
    before = rows(folder, "train.jsonl")
    for place in checkpoint.listed(folder):
        (place / "agent.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"no checkpoint .* is whole"):
        train(config(tmp_path, frames=400))
    assert rows(folder, "train.jsonl") == before


def test_another_configuration_is_refused(whole: Path) -> None:
    before = {p: p.read_bytes() for p in whole.glob("*.json*")}
    with pytest.raises(UserError, match=r"(?s)another configuration.*batch_size: 4 -> 8"):
        train(config(whole.parents[3], batch_size=8))
    assert before == {p: p.read_bytes() for p in whole.glob("*.json*")}


def test_a_damaged_checkpoint_falls_back(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = train(config(tmp_path, frames=200))
    newest = checkpoint.listed(folder)[0] / "replay.pt"
    newest.write_bytes(newest.read_bytes()[:-10])
    train(config(tmp_path, frames=400))
    assert "damaged" in capsys.readouterr().out
    same(whole, folder)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    trainer = Trainer(config(tmp_path, frames=10_000))
    original = trainer.observe

    def observe(action: Any) -> None:
        original(action)
        if trainer.steps == 95:
            trainer.agent.nets.critic.head.linear.weight.data[0, 0] = float("nan")

    trainer.observe = observe  # type: ignore[method-assign]
    with pytest.raises(Diverged, match="not finite"):
        trainer.run()
    assert [int(p.name) for p in checkpoint.listed(trainer.folder)] == [90, 60], "the last good ones"
    summary = json.loads((trainer.folder / "diverged.json").read_text())
    assert summary["metrics"]["critic_loss"] is None and len(summary["replay_index"]) == 4
    assert 0 <= summary["obs_min"] <= summary["obs_mean"] <= summary["obs_max"] <= 255
    assert 95 <= summary["steps"] <= 100


@pytest.mark.parametrize(
    ("changes", "critic", "actor"),
    [
        ({}, 80, 40),  # one update per step after 20 random ones, the actor every second
        ({"burst": 20}, 100, 60),  # the burst's step counter stands still at an even number
        ({"update_every": 2, "actor_every": 1, "target_every": 1}, 40, 40),
        ({"updates_per_step": 4}, 320, 160),  # gated by the update, not by the step
    ],
)
def test_how_often_is_updated(changes: dict[str, Any], critic: int, actor: int, tmp_path: Path) -> None:
    trainer = Trainer(config(tmp_path, method="rad", frames=200, eval_every=10_000, **changes))
    calls: list[bool] = []
    original = trainer.agent.update

    def update(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["actor"])
        assert kwargs["actor"] == kwargs["target"]
        return original(*args, **kwargs)

    trainer.agent.update = update  # type: ignore[method-assign]
    trainer.run()
    assert (len(calls), sum(calls)) == (critic, actor)


def test_video_tensorboard_and_states(tmp_path: Path) -> None:
    folder = train(config(tmp_path, frames=100, video=True, tensorboard=True, keep_states=True))
    assert sorted(p.name for p in (folder / "video").iterdir()) == ["0.mp4", "100.mp4"]
    assert list((folder / "tensorboard").iterdir())
    parts = checkpoint.load(folder, ("replay",), print)
    assert parts is not None and parts["replay"]["states"].shape[1] > 0 and parts["replay"]["states"].abs().sum() > 0


def test_a_method_of_one_s_own(tmp_path: Path) -> None:
    nu = View("nu", Shift(), 2)
    soft = View("soft", Blur(), on=nu[0])
    mine = Method(
        "mine",
        Target(View("mu", Shift(), 2)),
        critic=(Bellman(nu), Bellman(soft, 0.5), TangentProp(soft, 0.1)),
        actor=(Improve(nu[0]), PolicyKL(eta=nu[0], mu=soft, weight=0.1)),
    )
    folder = train(config(tmp_path, method="mine", frames=100), mine)
    assert folder.parent.name == "mine" and "tangent_soft" in read_rows(folder / "train.jsonl")[-1]
    assert load_agent(folder, print)[1].method == "mine"


def test_lag_acts_with_the_parameters_of_one_update_ago(tmp_path: Path) -> None:
    trainer = Trainer(config(tmp_path, lag=1, frames=100))
    for module in trainer.acting.own:
        for p in module.parameters():
            p.data.zero_()
    obs = trainer.env.reset()
    old = trainer.acting(obs, 0.0)
    trainer.acting.refresh()
    assert (trainer.acting(obs, 0.0) != old).any()
    trainer.close()


def test_evaluation_does_not_depend_on_the_workers(whole: Path) -> None:
    agent, c, steps = load_agent(whole, print)
    assert steps == 200
    results = []
    for workers in (1, 3):
        evaluator = Evaluator(c, workers, EVALUATE)
        results.append(evaluator.run(uniform_random(2, 1), 5, first=7).returns)
        evaluator.close()
    assert results[0] == results[1] and len(set(results[0])) > 1
    obs, moments = np.zeros((2, 9, 24, 24), np.uint8), np.zeros((2, 2), np.int64)
    assert deterministic(agent)(obs, moments).shape == (2, 2)


def test_evaluation_beside_training_gives_the_same_rows(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, here by force: played by a copy of the policy while training goes on."""
    monkeypatch.setattr(Updater, "settled", True)
    overlapped = 0
    finish = Trainer.finish_evaluation

    def counted(self: Trainer) -> None:
        nonlocal overlapped
        overlapped += self.evaluation is not None
        finish(self)

    monkeypatch.setattr(Trainer, "finish_evaluation", counted)
    same(whole, train(config(tmp_path)))
    assert overlapped == 4  # of five: the last has nothing to run beside


def test_random_policy_is_seeded() -> None:
    obs, moments = np.zeros((2, 9, 24, 24), np.uint8), np.array([[3, 0], [3, 1]])
    one, again, other = (uniform_random(2, seed)(obs, moments) for seed in (1, 1, 2))
    assert (one == again).all() and (one != other).any() and (one[0] != one[1]).any()
    assert (uniform_random(2, 1)(obs[:1], moments[1:]) == one[1:]).all()  # by episode and step, not by call


def test_evaluate_command(whole: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "unmoved.cli", "evaluate", str(whole), "--episodes", "3", "--video"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    row = read_rows(whole / "evaluations.jsonl")[-1]
    assert row["episodes"] == 3 and len(row["returns"]) == 3 and row["frames"] == 400
    assert (whole / "video" / "evaluation.mp4").is_file() and f"{row['return_mean']:.1f}" in done.stdout
