"""How noisy the gradients are: the paper argues from the losses' variance to the gradients'; here it is measured."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Generator, Tensor, nn

from unmoved.agent import Agent, Batch, weigh
from unmoved.diagnostics import Estimate, Statistics
from unmoved.losses import Draw


def critic_gradient(agent: Agent, batch: Batch, draw: Draw, std: Tensor) -> Tensor:
    """Of the batch's critic loss, all parameters in one vector. The class's passes: an agent's may be compiled."""
    Y = agent.method.target(Agent.target_pass(agent, batch, draw, std).y)
    loss, _ = weigh(agent.method.critic, Agent.critic_pass(agent, batch, draw, Y))
    return flat_gradient(loss, agent.critic_params)


def actor_gradient(agent: Agent, batch: Batch, draw: Draw, std: Tensor) -> Tensor:
    features = Agent.actor_features(agent, batch, draw)
    loss, _ = weigh(agent.method.actor, Agent.actor_pass(agent, features, draw, std))
    return flat_gradient(loss, agent.actor_params)


def flat_gradient(loss: Tensor, params: list[nn.Parameter]) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, params)])


def gradient_noise(agent: Agent, batch: Batch, std: Tensor, generator: Generator, triples: int) -> Statistics:
    """Std (root of the covariance's trace) and signal-to-noise of both gradients over draws at a fixed batch.

    Of two independent gradients, half the squared distance is an unbiased estimate of the trace and the inner product
    one of the squared mean. A third with one's transformations and the other's actions splits the trace."""
    B, out = len(batch.reward), Statistics()
    draws = []
    for _ in range(triples):
        one, two = (Draw.sample(agent.method, B, agent.action_dim, generator) for _ in range(2))
        draws.append((one, two, dataclasses.replace(two, noise=one.noise)))
    for name, gradient in (("critic", critic_gradient), ("actor", actor_gradient)):
        rows = []
        for draw in draws:
            g, h, mixed = (gradient(agent, batch, d, std) for d in draw)
            halves = [(a - b).square().sum() / 2 for a, b in ((g, h), (g, mixed), (h, mixed))]
            rows.append(torch.stack([*halves, g @ h]))
        values = torch.stack(rows)
        mean, error = values.mean(0).clamp(min=0), values.std(0) / math.sqrt(triples)
        root = mean.sqrt()
        for i, part in enumerate(("", "_transformation", "_action")):
            out[f"{name}_gradient_std{part}"] = Estimate(root[i], error[i] / (2 * root[i]).clamp(min=1e-12))
        snr = root[3] / root[0].clamp(min=1e-12)
        relative = torch.hypot(error[3] / mean[3].clamp(min=1e-12), error[0] / mean[0].clamp(min=1e-12)) / 2
        out[f"{name}_gradient_snr"] = Estimate(snr, snr * relative)
    return out
