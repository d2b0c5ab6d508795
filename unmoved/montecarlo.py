"""What the targets should be: discounted returns of the policy, played from stored simulator states.

The critic bootstraps through an episode's time limit, so the rollouts ignore it and last until gamma^H is small. They
are played in environments of their own: the run they look at is not touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from unmoved.agent import Agent, Batch
from unmoved.diagnostics import Statistics, Targets, over_states
from unmoved.envs.worker import EnvProcess
from unmoved.errors import UserError
from unmoved.evaluate import MONTE_CARLO, TRAIN, env_kwargs
from unmoved.replay import Replay

Image = NDArray[np.uint8]
Act = Callable[[Image, NDArray[np.float32]], tuple[NDArray[np.float32], NDArray[np.float64]]]
NO_LIMIT = 10**9  # frames
TAIL = 1e-3  # of the discount: what is cut off a return
SPREAD = 250  # agent steps among which an on-policy transition is chosen


class Env(Protocol):
    """What a rollout needs of an environment: answers are collected after all were asked."""

    def send_reset(self, episode: int | None = None) -> None: ...
    def send_return(self, state: NDArray[np.float64], obs: Image) -> None: ...
    def send_step(self, action: NDArray[np.float32]) -> None: ...
    def receive(self) -> Any: ...


def horizon(discount: float) -> int:
    """Steps after which gamma^H < 1e-3: 688 for 0.99."""
    return math.ceil(math.log(TAIL) / math.log(discount)) if discount < 1 else 1000


def acting(agent: Agent, std: float) -> Act:
    """The policy that the targets draw from, on the images as they are: action and log density from given noise."""
    scale = torch.tensor(std, device=agent.device)

    @torch.no_grad()
    def act(obs: Image, noise: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        x, z = (torch.from_numpy(v).to(agent.device) for v in (obs, noise))
        action, log_pi = agent.nets.actor(agent.nets.encoder(x), scale).sample(z)
        both = torch.cat([action, log_pi[:, None]], -1).cpu().numpy()
        return both[:, :-1].astype(np.float32), both[:, -1].astype(np.float64)

    return act


@dataclass
class Played:
    """Trajectories, zero after their end."""

    reward: NDArray[np.float64]  # (jobs, T)
    log_pi: NDArray[np.float64]
    action: NDArray[np.float32]  # (jobs, T, |A|)
    terminated: NDArray[np.int64]  # (jobs,) step after which it was over, T where it never was
    truncated: NDArray[np.bool_]  # (jobs,) ended by a time limit of its own
    seen: list[dict[int, Image]]  # observations before the steps asked for


def play(
    envs: list[Env],
    begin: list[Callable[[Env], None]],
    act: Act,
    steps: int,
    noise: Callable[[int], NDArray[np.float32]],
    watch: list[set[int]],
    progress: Callable[[], None],
) -> Played:
    """Play len(begin) trajectories, as many at a time as there are environments; `noise(job)` is (T, |A|), so a
    trajectory does not depend on which others are played beside it."""
    jobs = len(begin)
    out = Played(
        np.zeros((jobs, steps)),
        np.zeros((jobs, steps)),
        np.zeros((jobs, steps, noise(0).shape[1]), np.float32),
        np.full(jobs, steps),
        np.zeros(jobs, bool),
        [{} for _ in begin],
    )
    for first in range(0, jobs, len(envs)):
        going = dict(zip(range(first, min(jobs, first + len(envs))), envs, strict=False))
        z = {job: noise(job) for job in going}
        obs: dict[int, Image] = {}
        for job, env in going.items():
            begin[job](env)
        for job, env in going.items():
            answer = env.receive()
            obs[job] = answer[0] if isinstance(answer, tuple) else answer  # a reset also gives its info
        for t in range(steps):
            if not going:
                break
            actions, log_pi = act(np.stack([obs[j] for j in going]), np.stack([z[j][t] for j in going]))
            for k, (job, env) in enumerate(going.items()):
                if t in watch[job]:
                    out.seen[job][t] = obs[job]
                out.action[job, t], out.log_pi[job, t] = actions[k], log_pi[k]
                env.send_step(actions[k])
            for job, env in list(going.items()):
                obs[job], out.reward[job, t], terminated, truncated, _ = env.receive()
                if terminated or truncated:
                    out.terminated[job], out.truncated[job] = t + 1, truncated
                    out.seen[job] |= {when: obs[job] for when in watch[job] if when > t}
                    del going[job]
        progress()
    return out


def noise_of(seed: int, steps: int, action_dim: int) -> Callable[[int], NDArray[np.float32]]:
    return lambda job: np.random.default_rng([seed, job]).standard_normal((steps, action_dim)).astype(np.float32)


@dataclass(frozen=True)
class Returns:
    """Of B transitions, R rollouts each: r + gamma G(s'), without and with the entropy bonus."""

    plain: Tensor  # (B, R)
    soft: Tensor  # (B, R)
    restored: bool  # from replayed states; else on-policy transitions
    truncated: int  # rollouts that the environment cut short


def discounted(values: NDArray[np.float64], discount: float) -> NDArray[np.float64]:
    """sum_t gamma^t v_t over the last axis."""
    return values @ discount ** np.arange(values.shape[-1])


def restored_returns(
    envs: list[Env],
    agent: Agent,
    batch: Batch,
    states: NDArray[np.float64],
    act: Act,
    rollouts: int,
    seed: int,
    progress: Callable[[], None] = lambda: None,
) -> Returns:
    """Returns from s' of replayed transitions; `states` are those of s', one per transition."""
    gamma, H = agent.config.discount, horizon(agent.config.discount)
    obs = batch.next_obs.cpu().numpy()

    def at(i: int) -> Callable[[Env], None]:
        return lambda env: env.send_return(states[i], obs[i])

    going = [i for i, d in enumerate(batch.discount.tolist()) if d > 0]  # nothing comes after a termination
    begin = [at(i) for i in going for _ in range(rollouts)]
    plain, soft = np.zeros((2, len(obs), rollouts))
    truncated = 0
    if begin:
        noise = noise_of(seed, H, agent.action_dim)
        played = play(envs, begin, act, H, noise, [set() for _ in begin], progress)
        plain[going] = discounted(played.reward, gamma).reshape(-1, rollouts)
        soft[going] = discounted(played.reward - float(agent.alpha()) * played.log_pi, gamma).reshape(-1, rollouts)
        truncated = int(played.truncated.sum())

    def of_transition(G: NDArray[np.float64]) -> Tensor:
        return batch.reward[:, None] + batch.discount[:, None] * torch.from_numpy(G).to(batch.reward)

    return Returns(of_transition(plain), of_transition(soft), True, truncated)


def on_policy_returns(
    envs: list[Env],
    agent: Agent,
    act: Act,
    count: int,
    seed: int,
    progress: Callable[[], None] = lambda: None,
) -> tuple[Batch, Returns]:
    """For an environment that cannot be restored: transitions of fresh episodes, at random times, and what
    followed. One rollout each; a different law of states than the replay's."""
    gamma, n, H = agent.config.discount, agent.config.n_step, horizon(agent.config.discount)
    start = np.random.default_rng([seed, count]).integers(0, SPREAD, count)
    steps = int(start.max()) + n + H

    def reset(episode: int) -> Callable[[Env], None]:
        return lambda env: env.send_reset(episode)

    watch = [{int(t), int(t) + n} for t in start]
    noise = noise_of(seed, steps, agent.action_dim)
    played = play(envs, [reset(k) for k in range(count)], act, steps, noise, watch, progress)
    kept = [k for k in range(count) if start[k] in played.seen[k] and played.terminated[k] > start[k]]
    if not kept:
        raise UserError(f"no episode of {agent.config.task} lasted long enough to measure a return")
    rows = []
    for k in kept:
        t, end = int(start[k]), int(played.terminated[k])
        over = end <= t + n and not played.truncated[k]
        window, rest = slice(t, t + n), slice(t + n, t + n + H)
        plain = discounted(played.reward[k, rest], gamma)
        soft = discounted(played.reward[k, rest] - float(agent.alpha()) * played.log_pi[k, rest], gamma)
        rows.append((discounted(played.reward[k, window], gamma), 0.0 if over else gamma**n, plain, soft))
    reward, discount, plain, soft = torch.tensor(rows, device=agent.device).to(agent.nets.log_alpha.dtype).T
    obs, next_obs = (
        torch.from_numpy(np.stack([played.seen[k][int(start[k]) + ahead] for k in kept])).to(agent.device)
        for ahead in (0, n)
    )
    action = torch.from_numpy(np.stack([played.action[k, start[k]] for k in kept])).to(agent.device)
    batch = Batch(obs, action, reward, discount, next_obs)
    G, G_soft = ((reward + discount * g)[:, None] for g in (plain, soft))
    return batch, Returns(G, G_soft, False, int(played.truncated[kept].sum()))


def bias(targets: Targets, returns: Returns) -> Statistics:
    """How far the targets y (n, a, B) are from the returns, without and with the entropy bonus.

    bias: mean of E y - G. bias_mse: E (y - G)^2, the paper's number; the noise of G and of y is in it. bias_squared:
    (E y - E G)^2 with that noise taken off, where there are several rollouts."""
    out = Statistics()
    y = targets.y.flatten(0, 1)  # (n a, B)
    for name, G in (("", returns.plain), ("_soft", returns.soft)):
        mean, R = G.mean(1), G.shape[1]
        error = y.mean(0) - mean
        out[f"bias{name}"] = over_states(error)
        out[f"bias_mse{name}"] = over_states((y - mean).square().mean(0))
        if R > 1:
            noise = G.var(1) / R + targets.y.var(1).mean(0) / len(y)
            out[f"bias_squared{name}"] = over_states(error.square() - noise)
        out[f"return_played{name}"] = over_states(mean)
    return out


def measure_bias(
    agent: Agent,
    replay: Replay,
    targets: Callable[[Batch], Targets],
    generator: Generator,
    *,
    std: float,
    count: int,
    rollouts: int,
    workers: int,
    seed: int,
    progress: Callable[[], None] = lambda: None,
) -> tuple[Statistics, Returns]:
    """Bias of the targets of `count` transitions, from the replay where it holds simulator states, else on-policy."""
    config = agent.config
    stored = replay.states.shape[1] > 0
    kwargs = env_kwargs(config, TRAIN if stored else MONTE_CARLO) | {"episode_frames": NO_LIMIT}
    with ExitStack() as stack:
        envs: list[Env] = [stack.enter_context(closing(EnvProcess(**kwargs))) for _ in range(max(1, workers))]
        act = acting(agent, std)
        if stored:
            with replay.turns.sampling():
                batch = replay.sample(count, generator)
            assert batch.index is not None
            states = replay.states[((batch.index + config.n_step) % replay.slots).cpu().numpy()]
            returns = restored_returns(envs, agent, batch, states, act, rollouts, seed, progress)
        else:
            batch, returns = on_policy_returns(envs, agent, act, count * rollouts, seed, progress)
    return bias(targets(batch), returns), returns


def waves(rollouts: int, workers: int) -> int:
    """How often `progress` is called."""
    return -(-rollouts // workers)
