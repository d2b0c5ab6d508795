"""Returns from restored states: a chain whose returns are known, and real simulators that must repeat themselves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from unmoved import envs
from unmoved.agent import Batch
from unmoved.config import make_config
from unmoved.diagnostics import Targets, numbers
from unmoved.envs import PixelEnv
from unmoved.envs.worker import EnvProcess
from unmoved.measure import Recorder
from unmoved.montecarlo import acting, bias, horizon, noise_of, on_policy_returns, play, restored_returns
from unmoved.train import Trainer

GAMMA, ALPHA, LOG_PI, END = 0.9, 0.5, -0.25, 6


class Chain:
    """State k -> k + 1 whatever the action; reward k + its episode's offset; over at END. The offset is set by reset
    and is not part of the state, like reacher's target."""

    action_dim, episode_frames, size, state_size = 1, 4, 2, 1

    def __init__(self, end: int = END) -> None:
        self.k, self.offset, self.end = 0, 0.0, end

    def reset(self, seed: int) -> None:
        self.k, self.offset = 0, seed % 7 / 10

    def step(self, action: NDArray[np.float32]) -> tuple[float, bool, bool]:
        self.k += 1
        return self.k - 1 + self.offset, self.k == self.end, False

    def render(self) -> NDArray[np.uint8]:
        return np.full((3, 2, 2), self.k, np.uint8)

    def get_state(self) -> NDArray[np.float64]:
        return np.array([float(self.k)])

    def set_state(self, state: NDArray[np.float64]) -> None:
        self.k = int(state[0])

    def close(self) -> None:
        pass


class Here:
    """A PixelEnv of this process behind the interface of one in another."""

    def __init__(self, env: PixelEnv) -> None:
        self.env, self.answer = env, None

    def send_reset(self, episode: int | None = None) -> None:
        self.answer = self.env.reset(options={"episode": episode})

    def send_return(self, state: NDArray[np.float64], obs: NDArray[np.uint8]) -> None:
        self.answer = self.env.return_to(state, obs)

    def send_step(self, action: NDArray[np.float32]) -> None:
        self.answer = self.env.step(action)

    def receive(self) -> Any:
        return self.answer


def chain_env(end: int = END, **kwargs: Any) -> PixelEnv:
    return PixelEnv(Chain(end), seed=3, action_repeat=1, stack=2, **kwargs)


def chain_agent(n_step: int = 1) -> Any:
    config = SimpleNamespace(discount=GAMMA, n_step=n_step, task="chain")
    nets = SimpleNamespace(log_alpha=torch.zeros((), dtype=torch.float64))
    return SimpleNamespace(config=config, action_dim=1, device="cpu", nets=nets, alpha=lambda: torch.tensor(ALPHA))


def chain_act(obs: Any, noise: Any) -> Any:
    assert (obs[:, 3:] >= obs[:, :3]).all()  # oldest first
    return noise.clip(-1, 1), np.full(len(obs), LOG_PI)


def offset(episode: int) -> float:
    env = chain_env()
    env.reset(options={"episode": episode})
    assert isinstance(env.simulator, Chain)
    return env.simulator.offset


def returned(k: int, extra: float, end: int = END) -> float:
    return sum(GAMMA**t * (j + extra) for t, j in enumerate(range(k, end)))


def test_horizon() -> None:
    assert horizon(0.99) == 688 and 0.99**688 < 1e-3 < 0.99**687


def test_returns_of_a_chain() -> None:
    """r + gamma sum gamma^t r_t from each state of two episodes, past the time limit of 4; the bonus adds -alpha log pi
    to every reward; a terminated transition has its reward alone."""
    envs = [Here(chain_env(episode_frames=1000)) for _ in range(2)]
    cases = [(2, 1), (2, 5), (4, 3), (0, 0)]  # episode, k of s'
    states = np.array([[e, k] for e, k in cases], float)
    obs = torch.tensor([[[[max(k - 1, 0)]] * 3 + [[k]] * 3] for _, k in cases], dtype=torch.uint8)
    obs = obs.reshape(4, 6, 1, 1).expand(4, 6, 2, 2).contiguous()
    reward = torch.tensor([0.3, 0.1, 0.0, 7.0], dtype=torch.float64)
    discount = torch.tensor([GAMMA, GAMMA, GAMMA, 0.0], dtype=torch.float64)
    batch = Batch(obs, torch.zeros(4, 1), reward, discount, obs)
    got = restored_returns(envs, chain_agent(), batch, states, chain_act, rollouts=2, seed=0)
    assert len({offset(e) for e, _ in cases}) == 3, "the offsets must tell the episodes apart"
    for b, (episode, k) in enumerate(cases):
        G, bonus = returned(k, offset(episode)), returned(k, offset(episode) - ALPHA * LOG_PI)
        expected = [float(reward[b] + discount[b] * g) for g in (G, bonus)]
        assert got.plain[b].tolist() == pytest.approx([expected[0]] * 2)
        assert got.soft[b].tolist() == pytest.approx([expected[1]] * 2)
    assert got.restored and got.truncated == 0


def test_bias_by_hand() -> None:
    """y = 1, 3 at two transformations (one action, drawn twice), G = 0 and 2 over two rollouts."""
    y = torch.tensor([1.0, 3.0], dtype=torch.float64)[:, None, None].expand(2, 2, 3)
    G = torch.tensor([[0.0, 2.0]], dtype=torch.float64).expand(3, 2)
    got = numbers(bias(Targets(True, y), SimpleNamespace(plain=G, soft=G + 1)))  # type: ignore[arg-type]
    assert got["bias"] == 2 - 1 and got["bias_soft"] == 0
    assert got["bias_mse"] == ((1 - 1) ** 2 + (3 - 1) ** 2) / 2
    assert got["bias_squared"] == (2 - 1) ** 2 - 2 / 2  # variance of the mean of two rollouts
    assert got["return_played"] == 1 and got["bias_se"] == 0


def test_bias_is_zero_for_a_critic_that_is_right() -> None:
    """y = r + gamma V of the chain."""
    states = np.array([[1.0, k] for k in range(END)])
    V = torch.tensor([returned(k, offset(1)) for k in range(END)], dtype=torch.float64)
    obs = torch.zeros(END, 6, 2, 2, dtype=torch.uint8)
    ones = torch.ones(END, dtype=torch.float64)
    batch = Batch(obs, torch.zeros(END, 1), ones, GAMMA * ones, obs)
    env = Here(chain_env(episode_frames=1000))

    def act(obs: Any, noise: Any) -> Any:
        return noise.clip(-1, 1), np.full(len(obs), LOG_PI)

    returns = restored_returns([env], chain_agent(), batch, states, act, 2, seed=0)
    y = (1 + GAMMA * V).expand(3, 2, END)
    got = numbers(bias(Targets(True, y), returns))
    assert got["bias_mse"] == pytest.approx(0, abs=1e-20) and got["bias"] == pytest.approx(0, abs=1e-12)
    assert got["bias_soft"] < -0.1


@pytest.mark.parametrize("n_step", [1, 3])
def test_on_policy_returns_of_a_chain(n_step: int) -> None:
    """Without restoring: transitions of fresh episodes and what followed them."""
    end = 2000
    envs = [Here(chain_env(end, episode_frames=10_000)) for _ in range(3)]
    batch, got = on_policy_returns(envs, chain_agent(n_step), chain_act, count=4, seed=5)
    assert not got.restored and got.truncated == 0 and len(batch.reward) == 4
    start = np.random.default_rng([5, 4]).integers(0, 250, 4)
    for b, k in enumerate(start):
        extra = offset(b)
        assert batch.obs[b, -1, 0, 0] == k % 256 and batch.next_obs[b, -1, 0, 0] == (k + n_step) % 256
        assert float(batch.reward[b]) == pytest.approx(sum(GAMMA**t * (k + t + extra) for t in range(n_step)))
        assert float(batch.discount[b]) == pytest.approx(GAMMA**n_step)
        H = horizon(GAMMA)
        G = sum(GAMMA**t * (k + n_step + t + extra) for t in range(H))
        assert float(got.plain[b, 0]) == pytest.approx(float(batch.reward[b]) + GAMMA**n_step * G)


def test_trajectories_do_not_depend_on_their_neighbours() -> None:
    def run(workers: int) -> Any:
        envs = [Here(chain_env(50, episode_frames=1000)) for _ in range(workers)]
        begin = [(lambda env, e=e: env.send_reset(e)) for e in range(5)]
        return play(envs, begin, chain_act, 9, noise_of(1, 9, 1), [set()] * 5, lambda: None)  # type: ignore[arg-type]

    one, three = run(1), run(3)
    assert (one.reward == three.reward).all() and (one.action == three.action).all()
    assert one.action.std() > 0.1


@pytest.mark.parametrize("task", ["toy_reach", "reacher_easy", "walker_walk"])
def test_a_stored_state_repeats_its_episode(task: str) -> None:
    """In another process and after other episodes: the same rewards and images as in the episode it was stored in."""
    kwargs: dict[str, Any] = {"task": task, "seed": 4, "size": 24, "action_repeat": 2}
    env = envs.make(**kwargs)
    env.reset(options={"episode": 3})
    actions = np.random.default_rng(0).uniform(-1, 1, (12, env.simulator.action_dim)).astype(np.float32)
    obs = env._obs
    for action in actions[:6]:
        obs = env.step(action)[0]
    state = env.state()
    assert state[0] == 3 and state.shape == (env.state_size,)
    wanted = [env.step(a)[:2] for a in actions[6:]]
    env.close()
    process = EnvProcess(**kwargs)
    try:
        assert process.state_size == len(state)
        process.reset(0)
        process.send_step(actions[0])
        process.receive()
        process.send_return(state, obs)
        assert (process.receive() == obs).all()
        for action, (image, reward) in zip(actions[6:], wanted, strict=True):
            process.send_step(action)
            got = process.receive()
            assert got[1] == reward and (got[0] == image).all()
    finally:
        process.close()


def test_the_replay_s_states_lead_back_to_its_rewards(tmp_path: Path) -> None:
    """Restoring s of a stored transition and repeating its action gives its reward and next image."""
    config = make_config(
        "toy_reach", preset="cpu", method="rad", frames=260, action_repeat=2, image_size=24, batch_size=4, filters=4,
        feature_dim=8, hidden_dim=16, capacity=200, random_steps=100, n_step=1, eval_every=1000, eval_episodes=1,
        keep_states=True, device="cpu", runs=tmp_path,
    )  # fmt: skip
    trainer = Trainer(config)
    trainer.run()
    replay = trainer.replay
    start = replay.starts[: len(replay)]
    batch = replay.gather(start)
    env = envs.make("toy_reach", seed=config.seed, size=24, action_repeat=2, episode_frames=10**9)
    episodes = set()
    for b in range(0, len(start), 9):
        state = replay.states[int(start[b]) % replay.slots]
        episodes.add(state[0])
        env.return_to(state, batch.obs[b].numpy())
        obs, reward, *_ = env.step(batch.action[b].numpy())
        assert reward == pytest.approx(float(batch.reward[b])) and (obs == batch.next_obs[b].numpy()).all()
    assert len(episodes) > 1


def test_the_policy_of_the_rollouts(tmp_path: Path) -> None:
    """Action and log density of the actor at the image, from the given noise; the agent's own streams stay."""
    from unmoved.agent import Agent
    from unmoved.methods import make_method

    config = make_config(image_size=12, strides=(2, 1), filters=3, feature_dim=5, hidden_dim=6)
    agent = Agent(config, make_method(config), (9, 12, 12), 2)
    before = agent.acting.get_state()
    obs = np.random.default_rng(0).integers(0, 256, (3, 9, 12, 12), dtype=np.uint8)
    noise = np.random.default_rng(1).standard_normal((3, 2)).astype(np.float32)
    action, log_pi = acting(agent, 0.0)(obs, noise)
    policy = agent.nets.actor(agent.nets.encoder(torch.from_numpy(obs)), torch.tensor(0.0))
    wanted = policy.sample(torch.from_numpy(noise))
    assert np.allclose(action, wanted[0].detach(), atol=1e-6) and np.allclose(log_pi, wanted[1].detach(), atol=1e-5)
    assert torch.equal(before, agent.acting.get_state())


def test_what_cannot_be_restored_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config("toy_reach", preset="cpu", runs=tmp_path)
    agent: Any = SimpleNamespace(config=config)
    assert Recorder(agent, None, tmp_path, restorable=False).bias  # type: ignore[arg-type]
    assert "fresh episodes" in capsys.readouterr().out
    assert not Recorder(agent, None, tmp_path, restorable=True).bias  # type: ignore[arg-type]
    assert "--keep-states" in capsys.readouterr().out
