"""What `unmoved verify` looks at: networks in float64 and states under a finite set of transformations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from unmoved.agent import Agent, Batch, stream_seed
from unmoved.config import make_config
from unmoved.losses import soft_target
from unmoved.methods import make_method, make_transform
from unmoved.networks import MLP, Encoder, Head, Policy
from unmoved.transforms import Transformation, as_float

ACTIONS = 24  # of the discrete policies made from a network's
DRAWS = 32  # of a family that is not finite
TINY: dict[str, Any] = {"image_size": 24, "strides": (2, 1, 1), "filters": 6, "feature_dim": 8, "hidden_dim": 16}


@dataclass(frozen=True)
class Subject:
    """Networks in float64 and B states under a finite set T of n transformations that has the identity in it."""

    agent: Agent
    batch: Batch
    family: Transformation
    pixels: Tensor  # (n, B, C, H, W)
    identity: int  # its row
    generator: Generator

    def __post_init__(self) -> None:
        assert self.pixels.dtype == torch.float64

    @torch.no_grad()
    def critic(self) -> Tensor:
        """Q (n, 2, B) at the replayed action."""
        n, B = self.pixels.shape[:2]
        features = self.agent.nets.encoder(self.pixels.flatten(0, 1))
        return self.agent.nets.critic(features, self.batch.action.repeat(n, 1)).reshape(2, n, B).transpose(0, 1)

    @torch.no_grad()
    def policies(self) -> Policy:
        """Of n B states, row by row."""
        return self.agent.nets.actor(self.agent.nets.encoder(self.pixels.flatten(0, 1)), torch.tensor(0.3))

    @torch.no_grad()
    def targets(self) -> Tensor:
        """y (n, B) with states s instead of s': the set T is the same, and so is the equation."""
        n, B = self.pixels.shape[:2]
        x, policy = self.pixels.flatten(0, 1), self.policies()
        action, log_pi = policy.sample(torch.randn(policy.mu.shape, generator=self.generator))
        Q = self.agent.nets.target.critic(self.agent.nets.target.encoder(x), action)
        reward, discount = self.batch.reward.repeat(n), self.batch.discount.repeat(n)
        return soft_target(reward, discount, Q, self.agent.alpha(), log_pi).reshape(n, B)

    @torch.no_grad()
    def tables(self) -> list[tuple[Tensor, Tensor]]:
        """Per state: discrete policies (n, A) and Q (n, A). The actions are drawn at the original state; each policy
        weighs them by its density relative to that."""
        n, B = self.pixels.shape[:2]
        policy = self.policies()
        mu, std = (v.reshape(n, B, -1) for v in (policy.mu, policy.std))
        noise = torch.randn(ACTIONS, mu.shape[-1], generator=self.generator)
        features, out = self.agent.nets.encoder(self.pixels.flatten(0, 1)).reshape(n, B, -1), []
        for b in range(B):
            here, spread = (v[self.identity, b].expand(ACTIONS, -1) for v in (mu, std))
            action, u = replace(policy, mu=here, std=spread).sample(noise)[0], here + spread * noise
            log_density = (-0.5 * ((u - mu[:, b, None]) / std[:, b, None]).square() - std[:, b, None].log()).sum(-1)
            logits = (log_density - log_density[self.identity]).clamp(-30, 30)
            Q = [self.agent.nets.critic(f.expand(ACTIONS, -1), action).amin(0) for f in features[:, b]]
            out.append((torch.softmax(logits, -1), torch.stack(Q)))
        return out


def subject_of(agent: Agent, batch: Batch, family: Transformation, generator: Generator) -> Subject:
    B, support = len(batch.reward), family.support()
    x = batch.obs.double()
    if support is None:
        taus = [family.sample(B, generator) for _ in range(DRAWS)]
    else:
        taus = [tau.expand(B, *tau.shape) for tau in support]
    rows = [as_float(family(x, tau)).double() for tau in taus]
    same = [i for i, row in enumerate(rows) if torch.equal(row, x)]
    rows = rows if same else [x, *rows]
    return Subject(agent, batch, family, torch.stack(rows), same[0] if same else 0, generator)


def random_subject(transform: str, states: int, seed: int) -> Subject:
    """A small network in general position and images of noise."""
    config = make_config(**TINY, method="drq", seed=seed)
    agent = Agent(config, make_method(config), (9, config.image_size, config.image_size), action_dim=3)
    generator = Generator().manual_seed(stream_seed(seed, "verify"))
    with torch.no_grad():
        for p in agent.nets.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
        agent.nets.actor.trunk.biases[-1][..., 3:] += 0.8  # policies wide enough to overlap
    side = config.image_size
    obs = torch.randint(256, (states, 9, side, side), generator=generator)
    action = 2 * torch.rand(states, 3, generator=generator) - 1
    reward = torch.randn(states, generator=generator)
    batch = Batch(obs, action, reward, torch.full((states,), 0.99), obs)
    return subject_of(agent, batch, make_transform(transform or config.weak, config), generator)


def run_subject(run: Path, transform: str, states: int, seed: int) -> Subject:
    """The networks of a run, in float64, and states of its replay."""
    from unmoved.diagnose import load_run
    from unmoved.measure import weak_family

    torch.set_default_dtype(torch.float32)  # as it was trained
    loaded = load_run(run)
    generator = Generator().manual_seed(stream_seed(seed, "verify"))
    batch = loaded.replay.sample(states, generator)
    agent = loaded.agent
    for module in agent.nets.modules():
        if isinstance(module, Encoder | Head | MLP):
            module.dtype = None  # no bf16: the proofs are exact
    agent.nets.double()
    torch.set_default_dtype(torch.float64)
    family = make_transform(transform, loaded.config) if transform else weak_family(agent)
    batch = replace(batch, action=batch.action.double(), reward=batch.reward.double(), discount=batch.discount.double())
    return subject_of(agent, batch, family, generator)
