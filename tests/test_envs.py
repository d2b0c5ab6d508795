from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from numpy.typing import NDArray

from unmoved import envs
from unmoved.envs import PixelEnv, Stateful, dmc, gym
from unmoved.errors import UserError

Actions = NDArray[np.float32]


@pytest.fixture(scope="session")
def suite() -> Any:
    """dm_control's suite, with a renderer that works."""
    try:
        envs.make("cartpole_swingup").close()
    except UserError as error:
        pytest.skip(str(error))
    return dmc._import_suite()[0]


def random_actions(env: PixelEnv, steps: int) -> Actions:
    return np.random.default_rng(0).uniform(-1, 1, (steps, env.simulator.action_dim)).astype(np.float32)


def play(env: PixelEnv, actions: Actions) -> list[tuple[bytes, float, bool, bool]]:
    """Everything the agent sees, comparable bit by bit."""
    steps = (env.step(action) for action in actions)
    return [(obs.tobytes(), reward, terminated, truncated) for obs, reward, terminated, truncated, _ in steps]


# Names


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("walker_walk", "walker_walk"),
        ("walker-walk", "walker_walk"),
        ("dm_control/walker-walk-v0", "walker_walk"),
        ("dm_control/ball_in_cup-catch-v0", "ball_in_cup_catch"),
        ("ball-in-cup-catch", "ball_in_cup_catch"),
        ("cup_catch", "ball_in_cup_catch"),
        ("humanoid_cmu_walk", "humanoid_CMU_walk"),
        ("toy-reach", "toy_reach"),
        ("reach-duplo", "reach_duplo"),
        ("reach_duplo_vision", "reach_duplo"),
        ("CarRacing-v3", "CarRacing-v3"),
        ("ALE/Pong-v5", "ALE/Pong-v5"),
        ("my_module:make_env", "my_module:make_env"),
    ],
)
def test_canonical(spelling: str, name: str) -> None:
    assert envs.canonical(spelling) == name


def test_unknown_names_are_met_with_the_nearest_known_ones() -> None:
    with pytest.raises(UserError, match=r"unknown task 'waker_walk'\. Did you mean: walker_walk"):
        envs.make("waker_walk")
    with pytest.raises(UserError, match=r"unknown task 'cheetah_rum'\. Did you mean: cheetah_run"):
        envs.canonical("dm_control/cheetah-rum-v0")
    with pytest.raises(UserError, match=r"unknown Gymnasium environment 'Pendulm-v1'\. Did you mean: Pendulum-v1"):
        envs.make("Pendulm-v1")
    with pytest.raises(UserError, match="unknown task 'lqr_lqr_2_1'"):
        envs.canonical("lqr_lqr_2_1")


def test_names_and_the_list_of_tasks_import_no_simulator_and_no_torch() -> None:
    heavy = "print({'torch', 'mujoco', 'dm_control', 'OpenGL'} & set(sys.modules))"
    code = f"import sys, unmoved.envs as e; e.tasks(); e.canonical('walker-walk'); e.make('toy_reach').reset(); {heavy}"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_list_of_tasks() -> None:
    rows = {row.name: row for row in envs.tasks()}
    assert rows["walker_walk"] == ("walker_walk", 6, 0, "paper: ablation, generalisation")
    assert rows["quadruped_run"] == ("quadruped_run", 12, 2, "paper: DDPG")
    assert rows["reach_duplo"] == ("reach_duplo", 9, 0, "paper: DDPG")
    assert rows["fish_swim"].note == "" and rows["toy_reach"].camera is None
    assert set(" ".join(envs._PAPER.values()).split()) <= rows.keys()


def test_table_of_the_suite_is_the_suite(suite: Any) -> None:
    assert set(dmc.TASKS) == {f"{domain}_{task}" for domain, task in suite.ALL_TASKS if domain != "lqr"}
    seen = set()
    for row in dmc.TASKS.values():
        if (row.domain, row.action_dim) not in seen and row.domain != "dog":  # dog takes seconds to compile
            env = suite.load(row.domain, row.task)
            assert env.action_spec().shape == (row.action_dim,)
            assert env._step_limit == dmc.EPISODE_FRAMES
        seen.add((row.domain, row.action_dim))


# Frames, repeats, ends


@pytest.mark.parametrize("task", ["toy_reach", "toy_exit", "cartpole_swingup"])
@pytest.mark.filterwarnings("ignore:.*not having a spec:UserWarning")
def test_gymnasium_agrees_that_it_is_an_environment(task: str, request: pytest.FixtureRequest) -> None:
    if not task.startswith("toy"):
        request.getfixturevalue("suite")
    env = envs.make(task, episode_frames=20)
    check_env(env)
    env.close()


def test_observations_are_stacked_oldest_first() -> None:
    env = envs.make("toy_reach", size=32, stack=3)
    obs, _ = env.reset()
    assert obs.shape == (9, 32, 32) and obs.dtype == np.uint8
    first = obs[:3]
    assert (obs[3:6] == first).all() and (obs[6:] == first).all()
    one = env.step(np.ones(2, np.float32))[0]
    two = env.step(np.ones(2, np.float32))[0]
    assert (one[:3] == first).all() and (one[3:6] == first).all() and (one[6:] != first).any()
    assert (two[:6] == one[3:]).all() and (two[6:] != one[6:]).any()
    assert (env.simulator.render() == two[6:]).all()
    assert (env.render() == two[6:].transpose(1, 2, 0)).all()
    assert (obs[6:] == first).all()  # observations handed out earlier are not written to


def test_action_repeat_adds_rewards_up() -> None:
    single, triple = (envs.make("toy_reach", action_repeat=n) for n in (1, 3))
    single.reset()
    triple.reset()
    for action in random_actions(single, 5):
        rewards = [single.step(action)[1] for _ in range(3)]
        obs, reward, _, _, info = triple.step(action)
        assert reward == pytest.approx(sum(rewards)) and info == {"frames": 3}
    assert (obs[-3:] == single.simulator.render()).all()


def test_time_limit_truncates_and_cuts_the_last_repeat_short() -> None:
    env = envs.make("toy_reach", action_repeat=8)
    env.reset()
    assert env.episode_steps == 13
    steps = [env.step(np.zeros(2, np.float32)) for _ in range(13)]
    assert [truncated for _, _, _, truncated, _ in steps] == [False] * 12 + [True]
    assert not any(terminated for _, _, terminated, _, _ in steps)
    assert [info["frames"] for *_, info in steps] == [8] * 12 + [4]
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(np.zeros(2, np.float32))
    assert envs.make("toy_reach", episode_frames=7).episode_steps == 4


def test_the_end_of_the_world_terminates() -> None:
    env = envs.make("toy_exit")
    env.reset()
    terminated = truncated = False
    while not (terminated or truncated):  # straight on, out of the arena
        _, reward, terminated, truncated, _ = env.step(np.ones(2, np.float32))
    assert (reward, terminated, truncated) == (0.0, True, False)

    env.reset()
    assert isinstance(env.simulator, Stateful)
    terminated = False
    while not terminated:  # to the target
        state = env.simulator.get_state()
        _, reward, terminated, truncated, _ = env.step((20 * (state[2:] - state[:2])).astype(np.float32))
    assert reward == 1.0 and not truncated


def test_discount_tells_terminated_from_truncated(suite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env = envs.make("cartpole_swingup", episode_frames=6)
    env.reset()
    assert [env.step(np.zeros(1, np.float32))[2:4] for _ in range(3)] == [(False, False), (False, False), (False, True)]
    for discount, end in ((0.0, (True, False)), (1.0, (False, True))):
        env.reset()
        monkeypatch.setattr(env.simulator._env.task, "get_termination", lambda _, d=discount: d)  # type: ignore[attr-defined]
        _, _, *ends, info = env.step(np.zeros(1, np.float32))
        assert tuple(ends) == end and info == {"frames": 1}
    env.close()


def test_actions_are_clipped_and_their_shape_is_checked() -> None:
    far, near = envs.make("toy_reach"), envs.make("toy_reach")
    far.reset()
    near.reset()
    assert play(far, np.full((3, 2), 9, np.float32)) == play(near, np.ones((3, 2), np.float32))
    with pytest.raises(ValueError, match="action of shape"):
        far.step(np.zeros(3, np.float32))


def test_bad_numbers() -> None:
    for option in ({"action_repeat": 0}, {"stack": 0}, {"episode_frames": 0}, {"size": 0}):
        with pytest.raises(UserError, match="must be at least 1"):
            envs.make("toy_reach", **option)


# Episodes are functions of (seed, stream, number)


def test_an_episode_does_not_depend_on_what_came_before() -> None:
    walked, jumped = envs.make("toy_reach", seed=3), envs.make("toy_reach", seed=3)
    firsts = []
    for _ in range(3):
        firsts.append(walked.reset()[0].tobytes())
        play(walked, random_actions(walked, 2))
    assert len(set(firsts)) == 3
    assert jumped.reset(options={"episode": 2})[0].tobytes() == firsts[2]
    assert jumped.reset()[0].tobytes() == walked.reset()[0].tobytes()  # both go on with episode 3
    assert jumped.reset(seed=3)[0].tobytes() == firsts[0]
    assert jumped.reset(seed=4)[0].tobytes() == envs.make("toy_reach", seed=4).reset()[0].tobytes()


def test_seeds_and_streams_differ() -> None:
    first = {envs.make("toy_reach", seed=s, stream=t).reset()[0].tobytes() for s in range(4) for t in range(2)}
    assert len(first) == 8


@pytest.mark.parametrize("task", ["walker_walk", "reacher_easy"])
def test_suite_repeats_an_episode_bit_by_bit(suite: Any, task: str) -> None:
    env = envs.make(task, seed=1)
    actions = random_actions(env, 4)
    env.reset()
    play(env, actions)
    start = env.reset()[0]
    episode = play(env, actions)
    env.close()
    other = envs.make(task, seed=1)
    assert (other.reset(options={"episode": 1})[0] == start).all()
    assert play(other, actions) == episode
    assert (other.reset(seed=2)[0] != start).any()
    other.close()
    evaluation = envs.make(task, seed=1, stream=1)
    assert (evaluation.reset(options={"episode": 1})[0] != start).any()
    evaluation.close()


@pytest.mark.parametrize("task", ["toy_reach", "walker_walk", "cartpole_swingup", "reacher_easy"])
def test_snapshot_continues_bit_by_bit(task: str, request: pytest.FixtureRequest) -> None:
    if not task.startswith("toy"):
        request.getfixturevalue("suite")
    env = envs.make(task, seed=5)
    actions = random_actions(env, 16)
    env.reset()
    env.reset()
    play(env, actions[:10])
    snapshot = env.snapshot()
    rest = play(env, actions[10:])
    next_episode = env.reset()[0]
    env.close()

    other = envs.make(task)
    obs = other.restore(snapshot)
    assert (obs == snapshot["obs"]).all()
    assert play(other, actions[10:]) == rest
    assert (other.reset()[0] == next_episode).all()
    other.close()


def test_snapshot_before_the_first_reset_and_after_the_last_step() -> None:
    env = envs.make("toy_reach", seed=7)
    fresh = env.snapshot()
    assert fresh["episode"] == -1 and fresh["actions"].shape == (0, 2)
    first = env.reset()[0]
    play(env, random_actions(env, env.episode_steps))
    done = env.snapshot()

    other = envs.make("toy_reach")
    other.restore(done)
    with pytest.raises(gymnasium.error.ResetNeeded):
        other.step(np.zeros(2, np.float32))
    other.restore(fresh)
    with pytest.raises(gymnasium.error.ResetNeeded):
        other.step(np.zeros(2, np.float32))
    assert (other.reset()[0] == first).all()
    with pytest.raises(ValueError, match="snapshot of"):
        envs.make("toy_reach", stack=1).restore(fresh)


@pytest.mark.parametrize("task", ["toy_reach", "walker_walk"])
def test_state_continues_bit_by_bit_within_an_episode(task: str, request: pytest.FixtureRequest) -> None:
    if not task.startswith("toy"):
        request.getfixturevalue("suite")
    env = envs.make(task)
    simulator, actions = env.simulator, random_actions(env, 20)
    assert isinstance(simulator, Stateful)
    env.reset()
    for action in actions[:10]:
        simulator.step(action)
    state, image = simulator.get_state(), simulator.render()
    assert state.shape == (simulator.state_size,) and state.dtype == np.float64
    rewards = [simulator.step(action)[0] for action in actions[10:]]
    simulator.set_state(state)
    assert (simulator.render() == image).all()
    assert [simulator.step(action)[0] for action in actions[10:]] == rewards
    env.close()


# Rendering


@pytest.mark.parametrize("task", ["walker_walk", "cartpole_swingup", "finger_spin", "reacher_hard"])
def test_pixels_are_those_of_physics_render(suite: Any, task: str) -> None:
    row = dmc.TASKS[task]
    ours, stock = dmc.Suite(task, size=84), suite.load(row.domain, row.task, {"random": 0})
    for seed in (11, 12):
        ours.reset(seed)
        stock.task.random.seed(seed)
        stock.reset()
        for action in np.random.default_rng(seed).uniform(-1, 1, (3, row.action_dim)).astype(np.float32):
            for _ in range(8):
                reward = ours.step(action)[0]
                assert stock.step(action).reward == reward
            expected = stock.physics.render(84, 84, camera_id=0).transpose(2, 0, 1)
            assert (ours.render() == expected).all()
    ours.close()
    stock.close()


def test_reach_duplo_is_manipulations_vision_task(suite: Any) -> None:
    import mujoco
    from dm_control import manipulation

    env = envs.make("reach_duplo", seed=1)
    assert env.episode_steps == 125 and env.action_space.shape == (9,)
    start = env.reset()[0]
    env.reset()
    assert (env.reset(options={"episode": 0})[0] == start).all()

    vision, ours = manipulation.load("reach_duplo_vision", seed=5), env.simulator
    assert isinstance(ours, dmc.Suite)
    seen = vision.reset().observation
    ours.set_state(vision.physics.get_state(mujoco.mjtState.mjSTATE_INTEGRATION.value))
    assert (ours.render() == seen["front_close"][0].transpose(2, 0, 1)).all()
    spec = vision.action_spec()
    for unit in random_actions(env, 5):
        timestep = vision.step((spec.maximum + spec.minimum) / 2 + (spec.maximum - spec.minimum) / 2 * unit)
        assert ours.step(unit)[0] == timestep.reward
    assert (ours.render() == timestep.observation["front_close"][0].transpose(2, 0, 1)).all()
    env.close()
    env.close()


def test_environments_alive_together_do_not_disturb_each_other(suite: Any) -> None:
    tasks = ("walker_walk", "quadruped_escape", "cartpole_swingup")  # escape uploads terrain to its context at reset
    alone = []
    for task in tasks:
        env = envs.make(task)
        alone.append((env.reset()[0].tobytes(), play(env, random_actions(env, 2))))
        env.close()
    together = [envs.make(task) for task in tasks]
    starts = [env.reset()[0].tobytes() for env in together]
    actions = [random_actions(env, 2) for env in together]
    steps = [[play(env, a[t : t + 1])[0] for env, a in zip(together, actions, strict=True)] for t in range(2)]
    assert [(start, list(step)) for start, step in zip(starts, zip(*steps, strict=True), strict=True)] == alone
    together[1].close()
    together[1].close()  # twice does no harm
    assert together[0].reset(seed=0)[0].tobytes() == starts[0]  # the others go on
    together[0].close()
    together[2].close()


def test_camera_size_and_shadow_map(suite: Any) -> None:
    default, small = dmc.Suite("walker_walk", size=84), dmc.Suite("walker_walk", size=84, shadow_map=1024)
    other = dmc.Suite("walker_walk", size=64, camera=1)
    images = []
    for simulator in (default, small, other):
        simulator.reset(0)
        images.append(simulator.render())
        simulator.close()
    assert 0 < (images[0] != images[1]).any(0).mean() < 0.005
    assert images[2].shape == (3, 64, 64)
    with pytest.raises(UserError, match="walker_walk has no camera 9: choose 0 to 1"):
        envs.make("walker_walk", camera=9)


def test_actions_reach_the_ends_of_the_suites_range(suite: Any) -> None:
    simulator = dmc.Suite("quadruped_walk", size=84)  # its lifting actuators have the range [-1, 1.1]
    simulator.reset(0)
    spec = simulator._env.action_spec()
    for unit, bound in ((1.0, spec.maximum), (-1.0, spec.minimum)):
        simulator.step(np.full(12, unit, np.float32))
        np.testing.assert_allclose(simulator.physics.data.ctrl, bound, atol=1e-12)
    simulator.close()


@pytest.mark.skipif(sys.platform != "linux", reason="EGL")
@pytest.mark.parametrize("backend", ["egl", "bogus", "off"])
def test_without_opengl_one_sentence_says_what_to_install(backend: str) -> None:
    code = (
        "import unmoved.envs as e\nfrom unmoved.errors import UserError\n"
        "try: e.make('walker_walk')\nexcept UserError as error: print('MENDABLE', error)"
    )
    environment = {**os.environ, "MUJOCO_GL": backend, "__EGL_VENDOR_LIBRARY_FILENAMES": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.startswith(f"MENDABLE cannot render with OpenGL (MUJOCO_GL={backend}): "), done.stderr
    assert "apt-get install libegl1 libgl1 libosmesa6" in done.stdout and "setting MUJOCO_GL" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="EGL")
def test_a_renderer_is_chosen_only_when_nobody_else_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dm_control._render", raising=False)
    monkeypatch.setenv("DISPLAY", "")
    devices, osmesa = 1, None
    monkeypatch.setattr(dmc, "_egl_devices", lambda: devices)
    monkeypatch.setattr(dmc, "_load", lambda *_: osmesa)

    def chosen(mujoco_gl: str = "") -> str:
        monkeypatch.setenv("MUJOCO_GL", mujoco_gl)
        dmc._choose_gl()
        return os.environ["MUJOCO_GL"]

    assert chosen() == "egl"
    assert chosen("glfw") == "glfw"
    devices, osmesa = 0, object()
    assert chosen() == "osmesa"
    osmesa = None
    with pytest.raises(UserError, match="no EGL device, no OSMesa and no display"):
        chosen()
    monkeypatch.setenv("DISPLAY", ":0")
    assert chosen() == ""


def test_missing_dm_control(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dmc, "_choose_gl", lambda: None)
    monkeypatch.setitem(sys.modules, "dm_control", None)
    with pytest.raises(UserError, match="needs dm_control: pip install"):
        envs.make("walker_walk")


# Gymnasium environments


class Picture(gymnasium.Env[Any, Any]):
    """Shows a random picture and returns the sum of the action."""

    def __init__(self, observations: gymnasium.Space[Any] | None = None, actions: gymnasium.Space[Any] | None = None):
        self.observation_space = observations or gymnasium.spaces.Box(0, 255, (96, 120, 3), np.uint8)
        self.action_space = actions or gymnasium.spaces.Box(np.array([-2, 0]), np.array([2, 10]), dtype=np.float64)
        self.time = 0

    def observe(self) -> Any:
        self.observation_space.seed(int(self.np_random.integers(1 << 30)))
        return self.observation_space.sample()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        return self.observe(), float(np.sum(action)), self.time == 9, False, {}


def adapt(size: int = 84, **spaces: Any) -> PixelEnv:
    return PixelEnv(gym.Adapter("picture", Picture(**spaces), size=size))


def box(*shape: int) -> gymnasium.spaces.Box:
    return gymnasium.spaces.Box(0, 255, shape, np.uint8)


@pytest.mark.filterwarnings("ignore:.*not having a spec:UserWarning")
def test_gymnasium_environments_are_adapted(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = gymnasium.envs.registration.EnvSpec("Picture-v0", lambda **_: Picture(), max_episode_steps=5)
    monkeypatch.setitem(gymnasium.registry, "Picture-v0", spec)
    env = envs.make("Picture-v0", seed=2)
    assert env.episode_steps == 3 and env.action_space.shape == (2,)
    env.reset()
    *_, terminated, truncated, _ = env.step(np.array([1, -1], np.float32))
    assert not (terminated or truncated)
    env.step(np.zeros(2, np.float32))
    assert env.step(np.zeros(2, np.float32))[2:] == (False, True, {"frames": 1})
    check_env(env, skip_close_check=True)


def test_actions_are_scaled_and_ends_are_kept() -> None:
    env = adapt()
    assert env.episode_frames == 1000
    env.reset()
    assert env.step(np.array([1, -1], np.float32))[1] == 2 * (2 + 0)
    assert env.step(np.array([0, 1], np.float32))[1] == 2 * (0 + 10)
    for _ in range(2):
        env.step(np.zeros(2, np.float32))
    _, reward, terminated, truncated, info = env.step(np.zeros(2, np.float32))
    assert (reward, terminated, truncated, info) == (5.0, True, False, {"frames": 1})


def test_snapshot_of_an_adapted_environment() -> None:
    env, other = adapt(), adapt()
    env.reset()
    play(env, random_actions(env, 2))
    other.restore(env.snapshot())
    assert play(env, random_actions(env, 2)) == play(other, random_actions(env, 2))


@pytest.mark.parametrize("shape", [(84, 84, 3), (3, 84, 84), (84, 84, 1), (84, 84), (1, 84, 84)])
def test_layouts(shape: tuple[int, ...]) -> None:
    env = adapt(observations=gymnasium.spaces.Dict(pixels=box(*shape), speed=box(2)))
    frame = env.reset()[0][-3:]
    source = env.simulator._image  # type: ignore[attr-defined]
    channels_last = shape[-1] in (1, 3)
    expected = source.transpose(2, 0, 1) if channels_last else source
    assert (frame == np.broadcast_to(expected, (3, 84, 84))).all()


@pytest.mark.parametrize("shape", [(96, 120), (168, 168), (40, 84)])
def test_resizing(shape: tuple[int, int]) -> None:
    env = adapt(observations=box(*shape, 3))
    frame = env.reset()[0][-3:]
    source = torch.from_numpy(env.simulator._image).permute(2, 0, 1)[None].float()  # type: ignore[attr-defined]
    expected = torch.nn.functional.interpolate(source, (84, 84), mode="bilinear", antialias=True)[0].numpy()
    assert np.abs(frame - expected).max() <= 0.51


@pytest.mark.parametrize(
    ("spaces", "sentence"),
    [
        ({"actions": gymnasium.spaces.Discrete(4)}, "only continuous actions"),
        ({"actions": gymnasium.spaces.Box(-np.inf, np.inf, (2,))}, "needs finite bounds"),
        ({"observations": gymnasium.spaces.Box(-1, 1, (4,))}, "must be a uint8 image.*AddRenderObservation"),
        ({"observations": gymnasium.spaces.Box(0, 1, (84, 84, 3))}, "must be a uint8 image"),
        ({"observations": gymnasium.spaces.Dict(state=box(4))}, "under the key 'pixels'"),
        ({"observations": box(9, 84, 84)}, "one frame of 1 or 3 channels"),
    ],
)
def test_unsuitable_environments(spaces: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        adapt(**spaces)


def test_state_observations_of_a_registered_environment() -> None:
    with pytest.raises(UserError, match=r"Pendulum-v1 observes .*, but the observation must be a uint8 image"):
        envs.make("Pendulum-v1")


def test_environments_of_a_users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_envs.py").write_text(
        "from gymnasium import Env, spaces\nimport numpy as np\n"
        "class Blank(Env):\n"
        "    observation_space, action_space = spaces.Box(0, 255, (8, 8, 3), np.uint8), spaces.Box(-1, 1, (1,))\n"
        "    def reset(self, *, seed=None, options=None): return np.full((8, 8, 3), 7, np.uint8), {}\n"
        "def make_number(): return 3\n"
    )
    (tmp_path / "their_broken.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert (envs.make("their_envs:Blank").reset()[0] == 7).all()
    with pytest.raises(UserError, match=r"returned int, not a gymnasium\.Env"):
        envs.make("their_envs:make_number")
    with pytest.raises(UserError, match="module 'their_envs' has no function 'make_enw'"):
        envs.make("their_envs:make_enw")
    with pytest.raises(UserError, match="no module 'their_envz' here"):
        envs.make("their_envz:make_env")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        envs.make("their_broken:make_env")
    with pytest.raises(UserError, match="cannot make their_envz:Blank-v0"):
        envs.make("their_envz:Blank-v0")
