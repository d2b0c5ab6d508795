"""Presets against the paper's three tables, per-task overrides, step arithmetic, and the way to JSON and back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from unmoved.config import PRESETS, Config, differences, format_count, make_config, parse_count
from unmoved.errors import UserError

# What the three tables share.
COMMON: dict[str, Any] = {
    "stack": 3, "image_size": 84, "n_step": 1, "discount": 0.99, "filters": 32, "hidden_dim": 1024, "pad": 4,
    "weak": "shift", "kl_weight": 0.1, "kl_units": "author", "kl_stop": "first", "tangent_twins": "min",
    "tangent_reduce": "sum", "tangent_form": "author", "overlay_tangent_weight": 0.0, "explicit_weight": 0.2,
    "bellman_reduce": "mean", "eval_episodes": 10, "eval_every": 10_000, "J": 1, "M": None, "K": None,
    "updates_per_step": 1, "strong_in_target": False,
}  # fmt: skip
TABLES: dict[str, dict[str, Any]] = {
    "drq": {
        "action_repeat": 2, "capacity": 100_000, "random_steps": 1_000, "burst": 0, "frames": 500_000,
        "batch_size": 256, "lr": 1e-3, "alpha_lr": 1e-3, "alpha_beta1": 0.9, "target_every": 2, "actor_every": 2,
        "update_every": 1, "polyak_q": 0.01, "polyak_head": 0.01, "polyak_encoder": 0.01,
        "log_std_bounds": (-10.0, 2.0), "init_temperature": 0.1, "tangent_weight": 0.1, "feature_dim": 50,
        "policy": "tanh", "strides": (2, 1, 1, 1), "last_relu": True, "centre": False, "conv_init": "orthogonal",
        "early_actor_features": False,
    },
    "drqv2": {
        "action_repeat": 2, "capacity": 1_000_000, "random_steps": 2_000, "burst": 0, "n_step": 3, "batch_size": 256,
        "lr": 1e-4, "update_every": 2, "actor_every": 1, "target_every": 1, "polyak_q": 0.01, "polyak_head": 0.01,
        "polyak_encoder": 1.0, "std_clip": 0.3, "std_start": 1.0, "std_end": 0.1, "std_steps": 500_000,
        "tangent_weight": 0.1, "frames": 1_000_000, "feature_dim": 50, "policy": "clipped", "strides": (2, 1, 1, 1),
        "last_relu": True, "centre": True, "conv_init": "orthogonal", "early_actor_features": True,
    },
    "dmgb": {
        "action_repeat": 4, "capacity": 125_000, "random_steps": 1_000, "burst": 1_000, "frames": 500_000,
        "batch_size": 128, "lr": 1e-3, "alpha_lr": 1e-4, "alpha_beta1": 0.5, "target_every": 2, "actor_every": 2,
        "update_every": 1, "polyak_q": 0.01, "polyak_head": 0.05, "polyak_encoder": 0.05, "strong_weight": 0.5,
        "strong": "overlay", "tangent_weight": 0.5, "log_std_bounds": (-10.0, 2.0), "init_temperature": 0.1,
        "feature_dim": 100, "policy": "tanh_dmgb", "strides": (2,) + (1,) * 10, "last_relu": False, "centre": False,
        "conv_init": "delta", "early_actor_features": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("preset", TABLES)
def test_preset_is_the_papers_table(preset: str) -> None:
    config = make_config("cheetah_run", preset=preset)  # a task without overrides
    want = COMMON | TABLES[preset] | {"preset": preset, "task": "cheetah_run"}
    assert {k: getattr(config, k) for k in want} == want


# Section 4.1-4.3: what the tables, and the scripts behind them, say per task.
OVERRIDES: list[tuple[str, str, dict[str, Any]]] = [
    *[("drq", task, {"frames": 250_000}) for task in ("reacher_easy", "finger_spin", "ball_in_cup_catch")],
    *[("drq", task, {"frames": 500_000}) for task in ("walker_run", "reacher_hard", "finger_turn_hard")],
    ("drqv2", "finger_spin", {"std_steps": 100_000, "frames": 1_000_000, "n_step": 3, "batch_size": 256}),
    ("drqv2", "walker_run", {"n_step": 1, "batch_size": 512, "frames": 1_000_000, "std_steps": 500_000}),
    ("drqv2", "walker_walk", {"n_step": 1, "batch_size": 512, "std_steps": 100_000}),
    ("drqv2", "quadruped_run", {"capacity": 100_000, "frames": 3_100_000, "std_steps": 500_000}),
    ("drqv2", "quadruped_walk", {"capacity": 1_000_000, "frames": 3_100_000}),
    ("drqv2", "reach_duplo", {"capacity": 1_000_000, "frames": 3_100_000, "std_steps": 500_000}),
    *[
        ("drqv2", f"humanoid_{verb}", {"lr": 8e-5, "feature_dim": 100, "std_steps": 2_000_000, "frames": 30_100_000})
        for verb in ("walk", "stand")
    ],
    *[("drqv2", task, {"frames": 1_000_000, "std_steps": 500_000, "n_step": 3, "lr": 1e-4})
      for task in ("acrobot_swingup", "cheetah_run", "finger_turn_hard", "hopper_hop", "reacher_hard")],
    *[("drqv2", task, {"std_steps": 100_000})
      for task in ("cartpole_balance", "cartpole_balance_sparse", "cartpole_swingup", "ball_in_cup_catch",
                   "hopper_stand", "pendulum_swingup", "walker_stand")],
    ("dmgb", "finger_spin", {"action_repeat": 2, "capacity": 250_000, "frames": 500_000}),
    ("dmgb", "cartpole_swingup", {"action_repeat": 8, "capacity": 62_500, "frames": 500_000}),
    ("dmgb", "ball_in_cup_catch", {"action_repeat": 4, "capacity": 125_000, "frames": 500_000}),
    # the benchmark's page: 500k agent steps, evaluation every 10k agent steps
    ("dmgb_readme", "cartpole_swingup", {"action_repeat": 8, "frames": 4_000_000, "total_steps": 500_000,
                                         "capacity": 500_000, "eval_every": 80_000, "eval_episodes": 30}),
    ("dmgb_readme", "walker_walk", {"frames": 2_000_000, "total_steps": 500_000, "eval_every": 40_000}),
]  # fmt: skip


@pytest.mark.parametrize(("preset", "task", "want"), OVERRIDES, ids=lambda v: v if isinstance(v, str) else "")
def test_task_overrides(preset: str, task: str, want: dict[str, Any]) -> None:
    config = make_config(task, preset=preset)
    assert {k: getattr(config, k) for k in want} == want


def test_changes_win_over_preset_and_task() -> None:
    config = make_config("humanoid_walk", preset="drqv2", lr=1.0, frames=10, feature_dim=7)
    assert (config.lr, config.frames, config.feature_dim, config.capacity) == (1.0, 10, 7, 1_000_000)


# Section 4.4: run, frames, agent steps, burst + critic updates, actor updates, evaluations before the end.
ARITHMETIC = [
    ("drq", "walker_run", 500_000, 250_000, 0, 249_000, 124_500, 50),
    ("drq", "reacher_easy", 250_000, 125_000, 0, 124_000, 62_000, 25),
    ("dmgb", "walker_walk", 500_000, 125_000, 1_000, 124_000, 62_000, 51),
    ("dmgb", "cartpole_swingup", 500_000, 62_500, 1_000, 61_500, 30_750, 51),
    ("dmgb", "finger_spin", 500_000, 250_000, 1_000, 249_000, 124_500, 51),
    ("drqv2", "cheetah_run", 1_000_000, 500_000, 0, 249_000, 249_000, 100),
]


@pytest.mark.parametrize(("preset", "task", "frames", "steps", "burst", "critic", "actor", "evals"), ARITHMETIC)
def test_step_arithmetic(
    preset: str, task: str, frames: int, steps: int, burst: int, critic: int, actor: int, evals: int
) -> None:
    c = make_config(task, preset=preset)
    assert (c.frames, c.total_steps, c.burst) == (frames, steps, burst)
    rounds = (c.total_steps - c.random_steps) // c.update_every * c.updates_per_step
    assert (rounds, rounds // c.actor_every) == (critic, actor)
    last_too = preset == "dmgb"  # its loop runs up to and including the last step
    assert c.frames // c.eval_every + last_too == evals and c.eval_every % c.action_repeat == 0


def test_total_steps_rounds_up() -> None:
    assert make_config(frames=10, action_repeat=4).total_steps == 3
    assert make_config(frames=12, action_repeat=4).total_steps == 3


def test_std_schedule() -> None:
    """linear(1.0, 0.1, 500000) in agent steps."""
    config = make_config("cheetah_run", preset="drqv2")
    assert [config.std(s) for s in (0, 500_000, 10**9)] == pytest.approx([1.0, 0.1, 0.1])
    assert config.std(250_000) == pytest.approx(0.55) and config.std(100_000) == pytest.approx(0.82)
    assert make_config("finger_spin", preset="drqv2").std(50_000) == pytest.approx(0.55)


# ------------------------------------------------------------------------------------------------ counts


@pytest.mark.parametrize(
    ("text", "n"),
    [("5000", 5000), ("500k", 500_000), ("500K", 500_000), ("1.1M", 1_100_000), ("30.1m", 30_100_000), ("0", 0),
     ("1e3", 1000), ("62.5k", 62_500), ("0.001M", 1000)],
)  # fmt: skip
def test_parse_count(text: str, n: int) -> None:
    assert parse_count(text) == n


@pytest.mark.parametrize("text", ["", "k", "many", "5 x", "12kk", "nan"])
def test_parse_count_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="is not a count such as"):
        parse_count(text)


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0"), (999, "999"), (1000, "1k"), (1234, "1234"), (62_500, "62.5k"), (500_000, "500k"), (1_100_000, "1.1M"),
     (30_100_000, "30.1M"), (1_234_000, "1234k")],
)  # fmt: skip
def test_format_count(n: int, text: str) -> None:
    assert format_count(n) == text and parse_count(text) == n


# ------------------------------------------------------------------------------------------------ JSON and back


@pytest.mark.parametrize("preset", PRESETS)
def test_json_round_trip(preset: str, tmp_path: Path) -> None:
    config = make_config("finger_spin", preset=preset, overlay=tmp_path / "photos", camera=1, M=3)
    text = json.dumps(config.to_json())
    assert Config.from_json(json.loads(text)) == config
    bare = make_config("finger_spin", preset=preset)
    assert Config.from_json(json.loads(json.dumps(bare.to_json()))) == bare and bare.overlay is None


def test_load_takes_the_place_where_the_run_lies(tmp_path: Path) -> None:
    config = make_config("walker_walk", runs=Path("/elsewhere"), seed=4)
    folder = tmp_path / "moved" / "drq" / "walker_walk" / "ours" / "4"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    loaded = Config.load(folder)
    assert loaded.folder == folder and dataclasses.replace(loaded, runs=config.runs) == config


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "is not a run"), ("{", "cannot be read"), ('{"task": "walker_walk"}', "cannot be read"),
     ('{"runs": "runs", "speed": 3, "colour": 1}', "colour, speed")],
)  # fmt: skip
def test_load_refuses(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=message):
        Config.load(tmp_path)


def test_folder() -> None:
    config = make_config("a/b:c", preset="dmgb", method="svea", seed=3, runs=Path("r"))
    assert config.folder == Path("r/dmgb/a-b-c/svea/3")


def test_differences() -> None:
    old = make_config("walker_run")
    assert differences(old, old) == []
    free = dataclasses.replace(old, frames=7, runs=Path("x"), checkpoint_every=1, video=True)
    assert differences(old, dataclasses.replace(free, tensorboard=True)) == []
    assert differences(old, dataclasses.replace(old, device="cpu")) == ["device: auto -> cpu"]  # other random streams
    new = dataclasses.replace(old, lr=0.5, batch_size=8)
    assert differences(old, new) == ["batch_size: 256 -> 8", "lr: 0.001 -> 0.5"]
    read = Config.from_json(json.loads(json.dumps(old.to_json())))
    assert differences(read, old) == []  # tuples became lists on the way
    assert differences(old, dataclasses.replace(old, strides=(2, 2))) == ["strides: (2, 1, 1, 1) -> (2, 2)"]


@pytest.mark.parametrize(
    "changes",
    [{"frames": 0}, {"action_repeat": 0}, {"batch_size": 0}, {"n_step": 0}, {"stack": 0}, {"capacity": 255},
     {"eval_episodes": 0}, {"eval_every": 0}, {"strong_weight": 1.5}, {"strong_weight": -0.1}, {"update_every": 0},
     {"updates_per_step": 0}, {"actor_every": 0}, {"target_every": 0}, {"kl_weight": -1.0}, {"tangent_weight": -1.0},
     {"random_steps": 0}],
    ids=str,
)  # fmt: skip
def test_bad_values_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        make_config(**changes)
    field = next(iter(changes)).replace("_", "-")
    assert field in str(caught.value) or str(caught.value).startswith("weights")
    with pytest.raises(UserError):
        dataclasses.replace(make_config(), **changes)


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown preset 'drq2'\. Did you mean: .*drqv2"):
        make_config(preset="drq2")
    with pytest.raises(UserError, match=r"Known: .*dmgb"):
        make_config(preset="zzzzzz")


def test_the_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_config().lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("task", ["walker-walk", "dm_control/walker-walk-v0", "cup_catch"])
def test_every_spelling_of_a_task_has_its_overrides(task: str) -> None:
    name = "ball_in_cup_catch" if task == "cup_catch" else "walker_walk"
    a, b = make_config(task, preset="drqv2"), make_config(name, preset="drqv2")
    assert (a.n_step, a.batch_size, a.std_steps) == (b.n_step, b.batch_size, b.std_steps)


@pytest.mark.parametrize("n", [123_456_700, 999_999_900, 1_234_567_000])
def test_format_count_is_exact(n: int) -> None:
    assert parse_count(format_count(n)) == n


@pytest.mark.parametrize("text", ["inf", "1.5", "0.0001k"])
def test_counts_are_whole_numbers(text: str) -> None:
    with pytest.raises(ValueError, match="is not a count such as"):
        parse_count(text)


@pytest.mark.parametrize("changes", [{"M": 0}, {"K": 0}, {"K": -1}, {"J": 0}, {"pad": -1}, {"std_steps": 0}], ids=str)
def test_more_bad_values(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        make_config(**changes)


def test_dmgbs_camera() -> None:
    assert make_config("quadruped_walk", preset="dmgb").camera == 0
