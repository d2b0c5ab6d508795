"""The command line as a user meets it, in processes of its own where exit codes matter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unmoved import cli


def run(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "unmoved.cli", *args], capture_output=True, text=True, cwd=cwd)


def test_help_needs_no_torch() -> None:
    code = "import sys, unmoved.cli as c; c.main([]); assert 'torch' not in sys.modules and 'mujoco' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["trian"], "train"),
        (["train", "--seed", "2"], "name a task"),
        (["train", "walker_rnu"], "walker_run"),
        (["train", "toy_reach", "--method", "orus"], "ours"),
        (["train", "toy_reach", "--preset", "drqq"], "drq"),
        (["train", "toy_reach", "--frmes", "3"], "--frames"),
        (["train", "toy_reach", "--frames", "many"], "500k"),
        (["train", "toy_reach", "--frames=-1"], "positive"),
        (["train", "toy_reach", "--strong", "overly", "--method", "svea"], "overlay"),
        (["train", "toy_reach", "--device", "cuda:77"], "cuda:77"),
        (["train", "no_such_module:make"], "no_such_module"),
        (["train", "gymnasium:nothing"], "nothing"),
        (["train", "toy_reach", "--log-every", "0"], "log-every"),
        (["train", "toy_reach", "--seed=-1"], "seed"),
        (["train", "toy_reach", "--lr=-1"], "lr"),
        (["evaluate", "nowhere"], "config.json"),
        (["explain", "ourz"], "ours"),
        (["experiments", "ablatoin"], "ablation"),
        (["sweep", "ablation", "--tasks", "walker_rnu"], "walker_run"),
        (["sweep", "ablation", "--shard", "5/4"], "shard"),
        (["sweep", "ablation", "--", "--seed", "3"], "before the --"),
        (["status", "nowhere"], "nowhere"),
        (["report", "nowhere"], "nowhere"),
        (["report", ".", "--reference", "nothing.csv"], "nothing.csv"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_bad_input_is_one_sentence_and_exit_code_2(args: list[str], hint: str, tmp_path: Path) -> None:
    done = run(*args, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert hint in done.stderr + done.stdout and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [], "something was written"


@pytest.mark.parametrize(
    ("env", "word"), [("Pendulum-v1", "image"), ("CartPole-v1", "Box"), ("module:discrete", "Box")]
)
def test_environments_that_cannot_be_used(env: str, word: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        "import gymnasium, numpy as np\n"
        "class E(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8)\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "def discrete(): return E()\n"
    )
    done = run("train", env, "--preset", "cpu", cwd=tmp_path)
    assert done.returncode == 2 and word in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_without_opengl_nothing_is_written(tmp_path: Path) -> None:
    broken = os.environ | {"MUJOCO_GL": "egl", "__EGL_VENDOR_LIBRARY_FILENAMES": "/nonexistent"}
    words = [sys.executable, "-m", "unmoved.cli", "train", "cartpole_swingup", "--preset", "cpu"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=broken)
    assert done.returncode == 2 and "apt-get install" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_explain_has_the_configuration_s_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["explain", "dmgb/ours"])
    text = capsys.readouterr().out
    assert "0.5 mean_strong" in text and "0.1 KL_author" in text and "0.5 sum_nu1" in text and "batch 128" in text
    cli.main(["explain", "ours", "cheetah_run", "--preset", "drqv2", "--kl-weight", "0.7"])
    text = capsys.readouterr().out
    assert "0.99^3" in text and "0.7 KL" in text and "act1" in text and "alpha log pi(a'" not in text


def test_lists(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["methods"])
    assert "drq_kl_fixed" in capsys.readouterr().out
    cli.main(["tasks"])
    text = capsys.readouterr().out
    assert "quadruped_walk" in text and "paper" in text


def test_options_come_from_preset_and_task() -> None:
    config = cli.parse_config("train", ["walker-run", "--preset", "drqv2", "--seed", "3", "--frames", "1.1M"])
    assert (config.task, config.n_step, config.batch_size, config.frames) == ("walker_run", 1, 512, 1_100_000)
    config = cli.parse_config("train", ["cartpole_swingup", "--preset=dmgb", "--method", "svea", "--strong", "conv"])
    assert (config.action_repeat, config.capacity, config.strong) == (8, 62_500, "conv")
