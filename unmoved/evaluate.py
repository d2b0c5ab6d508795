"""Returns of the deterministic policy, in environments that share nothing with training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
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
# (n, C, H, W), and episode and step of each (n, 2) -> (n, |A|). Random policies draw by episode and step, so that the
# order in which processes are ready does not matter.
Act = Callable[[NDArray[np.uint8], NDArray[np.int64]], NDArray[np.float32]]


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
    """Plays numbered episodes in a few processes. Which episodes does not depend on how many."""

    def __init__(self, config: Config, workers: int, stream: int = EVALUATE, background: str = "train") -> None:
        self.scene = describe(background, config.task, config.videos, config.intensity)
        self.envs = EnvProcess.several(workers, **env_kwargs(config, stream, background))

    def run(self, act: Act, episodes: int, first: int = 0) -> Evaluation:
        """Episodes first, first + 1, … of the stream. Steps are taken together, one call of the policy for all; resets,
        which may take long (a clip has to be read), keep nobody waiting."""
        returns = dict.fromkeys(range(first, first + episodes), 0.0)
        waiting = list(returns)
        frames: list[NDArray[np.uint8]] = []
        # A row per process. The policy always sees them all, new or not: products of one shape, so that no action
        # depends on which processes happened to be ready.
        obs = np.zeros((len(self.envs), *self.envs[0].obs_shape), np.uint8)
        moments = np.zeros((len(self.envs), 2), np.int64)  # episode, step
        resetting: dict[Any, int] = {}  # rows that owe an answer, by pipe
        stepping: dict[Any, int] = {}

        def begin(row: int) -> None:
            moments[row] = waiting.pop(0), 0
            self.envs[row].send_reset(int(moments[row, 0]))
            resetting[self.envs[row].pipe] = row

        for row in range(min(len(self.envs), episodes)):
            begin(row)
        while resetting or stepping:
            ready: list[int] = []
            while stepping or (resetting and not ready):
                for pipe in wait([*resetting, *stepping]):
                    if pipe in resetting:
                        row = resetting.pop(pipe)
                        obs[row], _ = self.envs[row].receive()
                    else:
                        row = stepping.pop(pipe)
                        obs[row], reward, terminated, truncated, _ = self.envs[row].receive()
                        returns[int(moments[row, 0])] += reward
                        moments[row, 1] += 1
                        if terminated or truncated:
                            if waiting:
                                begin(row)
                            continue
                    ready.append(row)
            if not ready:
                continue
            actions = act(obs, moments)
            for row in ready:
                if moments[row, 0] == first:
                    frames.append(obs[row, -3:].transpose(1, 2, 0).copy())
                self.envs[row].send_step(actions[row])
                stepping[self.envs[row].pipe] = row
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
    def __call__(self, obs: NDArray[np.uint8], moments: NDArray[np.int64]) -> NDArray[np.float32]:
        encoder, actor = self.copy
        with torch.cuda.stream(self.stream):  # does nothing without one
            policy = actor(encoder(torch.from_numpy(obs).to(self.device)), torch.zeros((), device=self.device))
            return policy.mean.clamp(-1, 1).cpu().numpy()


def deterministic(agent: Agent) -> Act:
    return lambda obs, moments: agent.act(torch.from_numpy(obs)).cpu().numpy()


def uniform_random(action_dim: int, seed: int) -> Act:
    def act(obs: NDArray[np.uint8], moments: NDArray[np.int64]) -> NDArray[np.float32]:
        draws = [np.random.default_rng([seed, *moment]).uniform(-1, 1, action_dim) for moment in moments]
        return np.array(draws, np.float32)

    return act


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
