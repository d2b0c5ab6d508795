"""Environments by name: the DeepMind Control Suite, reach_duplo, two toys, any Gymnasium environment of images."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from unmoved.envs import backgrounds, dmc, gym, toy
from unmoved.envs.pixels import PixelEnv, Simulator, Snapshot, Stateful
from unmoved.errors import UserError, unknown

__all__ = ["PixelEnv", "Simulator", "Snapshot", "Stateful", "TaskInfo", "canonical", "make", "tasks"]

# Where the paper uses a task.
_PAPER = {
    "ablation": "finger_spin reacher_easy ball_in_cup_catch cheetah_run walker_walk reacher_hard walker_run "
    "finger_turn_hard cartpole_swingup_sparse",
    "DDPG": "quadruped_walk quadruped_run hopper_hop acrobot_swingup reacher_hard finger_turn_hard walker_run "
    "finger_spin cheetah_run reach_duplo",
    "generalisation": "walker_walk walker_stand cartpole_swingup ball_in_cup_catch finger_spin",
}
_ALIASES = {"cup_catch": "ball_in_cup_catch", "reach_duplo_vision": "reach_duplo"}


class TaskInfo(NamedTuple):
    name: str
    action_dim: int
    camera: int | None  # default; None where there is no choice
    note: str


def tasks() -> list[TaskInfo]:
    """Every task with a name of its own, without importing any simulator."""
    rows = [TaskInfo(name, toy.Toy.action_dim, None, "no OpenGL needed") for name in toy.TASKS]
    for name, task in (dmc.TASKS | dmc.MANIPULATION).items():
        uses = [part for part, names in _PAPER.items() if name in names.split()]
        rows.append(TaskInfo(name, task.action_dim, task.camera, f"paper: {', '.join(uses)}" if uses else ""))
    return rows


def canonical(task: str) -> str:
    """One spelling per task: walker-walk, dm_control/walker-walk-v0 and unmoved/walker_walk-v0 are walker_walk.

    Names of Gymnasium (with a / or ending in -v0, -v1, ...) and module:function pass as they are; make() looks them up.
    """
    known = {name.lower(): name for name in (*toy.TASKS, *dmc.TASKS, *dmc.MANIPULATION)}
    key = re.sub(r"^(dm_control|unmoved)/|-v\d+$", "", task).replace("-", "_").lower()
    key = _ALIASES.get(key, key)
    if key in known:
        return known[key]
    if not task.startswith(("dm_control/", "unmoved/")) and re.search(r"[/:]|-v\d+$", task):
        return task
    unknown("task", key, known.values())


def make(
    task: str,
    *,
    seed: int = 0,
    stream: int = 0,
    action_repeat: int = 2,
    stack: int = 3,
    size: int = 84,
    camera: int | None = None,
    shadow_map: int | None = None,
    episode_frames: int | None = None,
    background: str = "train",
    videos: Path | None = None,
    intensity: float = backgrounds.INTENSITY,
) -> PixelEnv:
    """The environment of a task: uint8 images (3 * stack, size, size), actions in [-1, 1].

    stream          independent episodes under one seed, for example 0 to train and 1 to evaluate
    camera          of the control suite only; by default 2 for the quadruped, else 0
    shadow_map      of the control suite only, texels per side: 1024 renders faster and changes 0.1 % of the pixels
    episode_frames  the time limit in simulator frames, instead of the task's own
    background      of the control suite only: see backgrounds.py
    videos          a folder of clips for video_easy, video_hard and distracting; without one they are generated
    intensity       of background distracting, 0 to 1
    """
    name = canonical(task)
    if size < 1:  # before a renderer is told
        raise UserError(f"size must be at least 1, not {size}.")
    backgrounds.check(background, name, intensity)
    simulator: Simulator
    if name in toy.TASKS:
        simulator = toy.Toy(name, size=size)
    elif name in dmc.TASKS or name in dmc.MANIPULATION:
        simulator = dmc.Suite(name, size=size, camera=camera, shadow_map=shadow_map)
    else:
        simulator = gym.Adapter(name, gym.load(name), size=size)
    env = PixelEnv(
        simulator, seed=seed, stream=stream, action_repeat=action_repeat, stack=stack, episode_frames=episode_frames
    )
    env.background = backgrounds.make(background, name, simulator, videos, intensity, env.episode_steps)
    return env
