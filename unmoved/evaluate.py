"""Returns of the deterministic policy, in environments that share nothing with training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from unmoved import checkpoint
from unmoved.agent import Agent
from unmoved.config import Config
from unmoved.envs.backgrounds import describe
from unmoved.envs.worker import EnvProcess
from unmoved.errors import UserError
from unmoved.methods import make_method

TRAIN, EVALUATE, RANDOM, MONTE_CARLO = 0, 1, 2, 3  # streams of episodes under one seed
Act = Callable[[NDArray[np.uint8]], NDArray[np.float32]]  # (n, C, H, W) -> (n, |A|)


def env_kwargs(config: Config, stream: int, background: str = "train") -> dict[str, Any]:
    """What `envs.make` needs for this run."""
    return {
        "task": config.task,
        "seed": config.seed,
        "stream": stream,
        "action_repeat": config.action_repeat,
        "stack": config.stack,
        "size": config.image_size,
        "camera": config.camera,
        "shadow_map": config.shadow_map,
        "background": background,
        "videos": config.videos,
        "intensity": config.intensity,
    }


@dataclass
class Evaluation:
    returns: list[float]  # one per episode
    frames: list[NDArray[np.uint8]]  # (h, w, 3) of the first episode
    scene: dict[str, Any]  # the background, and the clips in it

    def row(self) -> dict[str, Any]:
        return self.scene | {
            "episodes": len(self.returns),
            "return_mean": float(np.mean(self.returns)),
            "return_std": float(np.std(self.returns)),
            "returns": self.returns,
        }


class Evaluator:
    """Plays numbered episodes in lock-step over a few processes. Which episodes does not depend on how many."""

    def __init__(self, config: Config, workers: int, stream: int = EVALUATE, background: str = "train") -> None:
        self.scene = describe(background, config.task, config.videos, config.intensity)
        self.envs = [EnvProcess(**env_kwargs(config, stream, background)) for _ in range(workers)]

    def run(self, act: Act, episodes: int, first: int = 0) -> Evaluation:
        """Episodes first, first + 1, … of the stream."""
        returns = dict.fromkeys(range(first, first + episodes), 0.0)
        waiting = list(returns)
        frames: list[NDArray[np.uint8]] = []
        playing: dict[EnvProcess, int] = {}
        obs: dict[EnvProcess, NDArray[np.uint8]] = {}
        idle = list(self.envs)
        while playing or waiting:
            for env in idle[: len(waiting)]:
                playing[env] = waiting.pop(0)
                env.send_reset(playing[env])
            for env in idle:
                if env in playing:
                    obs[env] = env.receive()[0]
            actions = act(np.stack([obs[env] for env in playing]))
            for env, action in zip(playing, actions, strict=True):
                if playing[env] == first:
                    frames.append(obs[env][-3:].transpose(1, 2, 0))
                env.send_step(action)
            idle = []
            for env in list(playing):
                obs[env], reward, terminated, truncated, _ = env.receive()
                returns[playing[env]] += reward
                if terminated or truncated:
                    del playing[env]
                    idle.append(env)
        return Evaluation(list(returns.values()), frames, self.scene)

    def close(self) -> None:
        for env in self.envs:
            env.close()


class Player:
    """The deterministic policy of one moment: a copy of its parameters, on a stream of its own, so that training may go
    on meanwhile."""

    def __init__(self, agent: Agent) -> None:
        self.device = agent.device
        self.own = nn.ModuleList([agent.nets.encoder, agent.nets.actor])
        self.copy = copy.deepcopy(self.own)
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def take(self) -> None:
        """The present parameters."""
        self.copy.load_state_dict(self.own.state_dict())
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    @torch.no_grad()
    def __call__(self, obs: NDArray[np.uint8]) -> NDArray[np.float32]:
        encoder, actor = self.copy
        with torch.cuda.stream(self.stream):  # does nothing without one
            policy = actor(encoder(torch.from_numpy(obs).to(self.device)), torch.zeros((), device=self.device))
            return policy.mean.clamp(-1, 1).cpu().numpy()


def deterministic(agent: Agent) -> Act:
    return lambda obs: agent.act(torch.from_numpy(obs)).cpu().numpy()


def uniform_random(action_dim: int, seed: int) -> Act:
    rng = np.random.default_rng(seed)
    return lambda obs: rng.uniform(-1, 1, (len(obs), action_dim)).astype(np.float32)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device '{name}' cannot be used: {str(error).splitlines()[0]}") from None
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)  # streams and graphs are made on the current device
    return device


def load_agent(run: Path, say: Callable[[str], None], device: str = "cpu") -> tuple[Agent, Config, int]:
    """The trained agent of a run folder, its configuration and its agent steps."""
    config, place = Config.load(run), pick_device(device)
    parts = checkpoint.load(run, ("agent",), say, place)
    if parts is None:
        raise UserError(f"{run} has no whole checkpoint yet")
    state = parts["agent"]
    method = make_method(replace(config, method="sac"))  # acting needs no losses, nor the images behind an overlay
    agent = Agent(config, method, tuple(state["obs_shape"]), state["action_dim"], place)
    agent.nets.load_state_dict(state["agent"]["nets"])  # acting needs neither optimisers nor random streams
    return agent, config, state["steps"]
