"""The Gymnasium ids as users of other libraries meet them, and the examples of environments of one's own."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from unmoved import envs
from unmoved.envs import dmc
from unmoved.errors import UserError

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def suite() -> None:
    try:
        envs.make("cartpole_swingup").close()
    except UserError as error:
        pytest.skip(str(error))


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_importing_the_library_registers_every_task_and_loads_no_simulator() -> None:
    heavy = "{'torch', 'mujoco', 'dm_control', 'OpenGL', 'matplotlib'} & set(sys.modules)"
    ids = "(k for k in gymnasium.registry if k.startswith('unmoved/'))"
    done = run(f"import sys, unmoved, gymnasium; print(*{ids}); print({heavy})")
    registered, loaded = done.stdout.splitlines()
    assert loaded == "set()"
    assert set(registered.split()) == {f"unmoved/{row.name}-v0" for row in envs.tasks()}


@pytest.mark.parametrize("task", ["toy_reach", "toy_exit", "cartpole_swingup"])
def test_ids_pass_gymnasiums_checker_without_a_warning(task: str, request: pytest.FixtureRequest) -> None:
    if not task.startswith("toy"):
        request.getfixturevalue("suite")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make(f"unmoved/{task}-v0", episode_frames=20, render_mode="rgb_array")
        check_env(env.unwrapped)  # makes it once more from its spec, to render
        obs, _ = env.reset(seed=1)
        steps = 0
        while True:
            steps += 1
            obs, _, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                break
        assert steps <= 10 and (env.render() == obs[-3:].transpose(1, 2, 0)).all()
        env.close()


def test_options_are_those_of_make() -> None:
    env = gymnasium.make("unmoved/toy_reach-v0", size=32, stack=2, action_repeat=4)
    assert env.observation_space.shape == (6, 32, 32) and env.unwrapped.action_repeat == 4  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="colour"):
        gymnasium.make("unmoved/toy_reach-v0", colour="red")
    with pytest.raises(UserError, match="render_mode is 'rgb_array', not 'human'"):
        gymnasium.make("unmoved/toy_reach-v0", render_mode="human")


def test_a_seed_decides_the_episodes_and_no_seed_leaves_them_open() -> None:
    def first(seed: int | None, at_reset: int | None = None) -> bytes:
        return gymnasium.make("unmoved/toy_reach-v0", seed=seed).reset(seed=at_reset)[0].tobytes()

    assert first(5) == first(5) == first(None, 5) == envs.make("toy_reach", seed=5).reset()[0].tobytes()
    assert first(5) != first(6) and first(None) != first(None)


def test_unmoveds_ids_are_task_names_too() -> None:
    assert envs.canonical("unmoved/walker_walk-v0") == "walker_walk"
    with pytest.raises(UserError, match="Did you mean: walker_walk"):
        envs.canonical("unmoved/waker_walk-v0")


def test_in_a_vector_each_environment_plays_its_own_episodes() -> None:
    vector = gymnasium.make_vec("unmoved/toy_reach-v0", num_envs=3, vectorization_mode="sync", size=32)
    obs, _ = vector.reset(seed=4)
    assert obs.shape == (3, 9, 32, 32)
    for i, single in enumerate(obs):
        assert (single == envs.make("toy_reach", seed=4 + i, size=32).reset()[0]).all()
    obs, _ = vector.reset()
    assert (obs[0] != obs[1]).any()
    vector.close()


def test_a_vector_of_processes_renders_what_one_process_does(suite: None) -> None:
    vector = gymnasium.make_vec("unmoved/cartpole_swingup-v0", num_envs=2, seed=7)
    obs, _ = vector.reset()
    actions = np.ones((2, 1), np.float32)
    after, rewards, *_ = vector.step(actions)
    vector.close()
    for i in range(2):
        env = envs.make("cartpole_swingup", seed=7 + i)
        assert (env.reset()[0] == obs[i]).all()
        single, reward, *_ = env.step(actions[i])
        assert (single == after[i]).all() and reward == rewards[i]
        env.close()


def test_rendering_in_a_forked_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dmc, "_opened_in", 1)  # as in a child of process 1
    with pytest.raises(UserError, match="forked from one that had opened OpenGL"):
        envs.make("cartpole_swingup")


# Environments of one's own


class Lying(gymnasium.Env[Any, Any]):
    """Declares one shape and shows another."""

    observation_space = gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8)
    action_space = gymnasium.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros((8, 9, 3), np.uint8), {}


def test_an_image_of_another_shape_than_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = gymnasium.envs.registration.EnvSpec("Lying-v0", lambda **_: Lying(), order_enforce=False)
    monkeypatch.setitem(gymnasium.registry, "Lying-v0", spec)
    with pytest.raises(UserError, match=r"Lying-v0 showed an image of shape \(8, 9, 3\), but declares \(8, 8, 3\)"):
        envs.make("Lying-v0").reset()


def test_example_of_a_new_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    env = envs.make("new_env:make_env", action_repeat=2, size=48)
    check_env(env, skip_render_check=True)
    for sign in (-1, 1):  # a bar pushed to one side falls to that side
        env.reset(seed=0)
        while True:
            obs, reward, terminated, truncated, _ = env.step(np.array([sign], np.float32))
            if terminated or truncated:
                break
        bar = np.nonzero(obs[-3] > 150)[1]
        assert terminated and reward < 2 and sign * (bar.mean() - 23.5) > 5
    import_module("new_env").main(frames=40, runs=tmp_path)
    assert (tmp_path / "cpu" / "new_env-make_env" / "drq" / "1" / "eval.jsonl").read_text().count("\n") == 2


@pytest.mark.skipif(find_spec("Box2D") is None, reason="CarRacing needs Box2D: pip install 'unmoved[box2d]'")
def test_example_of_car_racing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    env = envs.make("car_racing:make_env", action_repeat=4, size=64)
    assert env.action_space.shape == (2,) and env.episode_frames == 1000
    first, _ = env.reset(seed=1)
    returns = []
    for pedal in (1.0, -1.0):  # full gas for a second leaves the place, braking does not
        env.reset(seed=1)
        returns.append(sum(float(env.step(np.array([0.0, pedal], np.float32))[1]) for _ in range(30)))
    assert first.shape == (9, 64, 64) and returns[0] > returns[1]
    env.close()
