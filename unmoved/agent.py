"""The agent: acting, and one update, the same for every method. A batch and a draw decide it, nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn

from unmoved.config import Config
from unmoved.kernels import Windows, obstacle, pixels_last
from unmoved.log import console
from unmoved.losses import ActorPass, CriticPass, Draw, Method, PolicyKL, Sample, samples, soft_target
from unmoved.networks import Networks
from unmoved.transforms import as_float

Metrics = dict[str, Tensor]


@dataclass
class Batch:
    """Raw transitions, never augmented. n-step returns and discounts are already rebuilt."""

    obs: Tensor  # (B, C, H, W) uint8
    action: Tensor  # (B, |A|)
    reward: Tensor  # (B,)
    discount: Tensor  # (B,): gamma^n, 0 after a termination
    next_obs: Tensor  # (B, C, H, W) uint8
    index: Tensor | None = None  # (B,) where it lies in the replay


@dataclass
class TargetPass:
    """The K views of s'."""

    y: Tensor  # (K, B)
    Q: Tensor  # (2, K, B) of the target critic
    log_pi: Tensor  # (K, B)
    action: Tensor  # (K, B, |A|)


def stream_seed(seed: int, name: str) -> int:
    """Seeds of a run's random streams: unrelated to each other and to those of other runs."""
    return int(np.random.SeedSequence([seed, *name.encode()]).generate_state(1)[0])


class Agent:
    def __init__(
        self,
        config: Config,
        method: Method,
        obs_shape: tuple[int, ...],
        action_dim: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.method, self.action_dim = config, method, action_dim
        self.device = torch.device(device)
        torch.manual_seed(stream_seed(config.seed, "parameters"))
        self.nets = Networks(config, obs_shape, action_dim).to(self.device)
        if self.device.type == "cuda" and config.compile and config.precision == "bf16":
            self.use_kernels(obs_shape)
        self.entropy_bonus = config.policy != "clipped"  # DDPG has no temperature
        self.critic_params = [*self.nets.encoder.parameters(), *self.nets.critic.parameters()]
        self.actor_params = list(self.nets.actor.parameters())
        adam: Any = {"foreach": True, "capturable": self.device.type == "cuda"}
        self.optimizers = {
            "critic": torch.optim.Adam(self.critic_params, lr=config.lr, **adam),
            "actor": torch.optim.Adam(self.actor_params, lr=config.lr, **adam),
            "alpha": torch.optim.Adam(
                [self.nets.log_alpha], lr=config.alpha_lr, betas=(config.alpha_beta1, 0.999), **adam
            ),
        }
        self.generator = Generator(self.device).manual_seed(stream_seed(config.seed, "draws"))
        self.acting = Generator(self.device).manual_seed(stream_seed(config.seed, "acting"))

    def use_kernels(self, obs_shape: tuple[int, ...]) -> None:
        problem = obstacle(obs_shape, self.config.filters, self.config.strides)
        if problem is None:
            self.nets.encoder.fused = self.nets.target.encoder.fused = True
        else:
            console.print(f"convolutions run through cuDNN, not as kernels of our own: {problem}")

    # -------------------------------------------------------------------------------------------- acting

    @torch.no_grad()
    def act(self, obs: Tensor, std: float = 0.0, explore: bool = False) -> Tensor:
        """(n, C, H, W) -> (n, |A|) in [-1, 1]: the mean action, or one sampled from the policy."""
        scale = torch.tensor(std, device=self.device)
        policy = self.nets.actor(self.nets.encoder(obs.to(self.device)), scale, clip=float("inf"))
        if not explore:
            return policy.mean.clamp(-1, 1)
        noise = torch.randn(policy.mu.shape, generator=self.acting, device=self.device)
        return policy.sample(noise)[0].clamp(-1, 1)

    # -------------------------------------------------------------------------------------------- updating

    def update(self, batch: Batch, draw: Draw, std: Tensor, *, actor: bool = True, target: bool = True) -> Metrics:
        """One update: Y, critic step, then (if asked) actor step, temperature step, target networks. std: DDPG's ()."""
        if actor:
            self.method.check_whole()
        values = self.target_pass(batch, draw, std)
        loss, metrics, features = self.critic_loss(batch, draw, values.y)
        # DrQ-v2's actor reads the convolutions as they are before the critic's step: those of its pass will do.
        early = self.actor_features(batch, draw, features) if actor and self.config.early_actor_features else None
        step(self.optimizers["critic"], loss, self.critic_params)
        if actor:
            metrics |= self.update_actor(early or self.actor_features(batch, draw), draw, std)
        if target:
            self.follow()
        return metrics

    def update_actor(self, features: dict[str, Tensor], draw: Draw, std: Tensor) -> Metrics:
        loss, metrics, log_pi = self.actor_loss(features, draw, std)
        step(self.optimizers["actor"], loss, self.actor_params)
        if self.entropy_bonus:
            step(self.optimizers["alpha"], self.temperature_loss(log_pi), [self.nets.log_alpha])
        return metrics

    def critic_loss(self, batch: Batch, draw: Draw, y: Tensor) -> tuple[Tensor, Metrics, dict[str, Tensor]]:
        """The critic terms' weighted sum, what is logged of it, and the views' convolution features."""
        critic = self.critic_pass(batch, draw, self.method.target(y))
        loss, metrics = weigh(self.method.critic, critic)
        metrics |= {"critic_loss": loss.detach(), "target_mean": y.mean(), "q_mean": mean(critic.Q)}
        return loss, metrics, critic.features

    def actor_loss(self, features: dict[str, Tensor], draw: Draw, std: Tensor) -> tuple[Tensor, Metrics, Tensor]:
        """The actor terms' weighted sum, what is logged of it, and log pi (B,) at its first policy view."""
        actor = self.actor_pass(features, draw, std)
        loss, metrics = weigh(self.method.actor, actor)
        log_pi = next(iter(actor.log_pi.values())).detach()
        if self.entropy_bonus:
            metrics |= {"entropy": -log_pi.mean(), "alpha": actor.alpha}
        kl = next((term for term in self.method.actor if isinstance(term, PolicyKL)), None)
        if kl is not None:  # in the tables' units and exactly, whichever is trained on
            metrics |= {f"kl_{u}": kl.distance(actor, u).detach().mean() for u in ("author", "exact")}
        return loss, metrics | {"actor_loss": loss.detach()}, log_pi

    @torch.no_grad()
    def target_pass(self, batch: Batch, draw: Draw, std: Tensor) -> TargetPass:
        """y at each view of s', with its own action of the online policy, valued by the target critic."""
        draw, views = draw.fresh(), samples(self.method.target.mu)
        K, B = len(views), len(batch.reward)
        x = self.views(batch.next_obs, draw, views, "'")
        features = self.nets.encoder(x)
        shared = self.config.polyak_encoder == 1.0  # the target encoder is the online one, step by step
        held = features if shared else self.nets.target.encoder(x)
        action, log_pi = self.nets.actor(features, std).sample(torch.cat([draw.noise[s.key + "'"] for s in views]))
        Q = self.nets.target.critic(held, action)  # (2, K B)
        y = soft_target(batch.reward.repeat(K), batch.discount.repeat(K), Q, self.alpha(), log_pi)
        return TargetPass(y.reshape(K, B), Q.reshape(2, K, B), log_pi.reshape(K, B), action.reshape(K, B, -1))

    def critic_pass(self, batch: Batch, draw: Draw, Y: Tensor) -> CriticPass:
        """Q, and dQ where a term asks, at every view that a term names: one encoder pass."""
        draw, tangent = draw.fresh(), self.method.tangent_samples()
        first = {s.key for s in tangent}  # a dual batch has the rows with tangents first
        views = tangent + [s for s in self.method.critic_samples() if s.key not in first]
        B, t = len(batch.reward), len(tangent) * len(batch.reward)
        dx = torch.cat([draw.tangent(batch.obs, s) for s in tangent]) if tangent else None
        features = self.nets.encoder(self.views(batch.obs, draw, views), dx)
        q = self.nets.critic(features, batch.action.repeat(len(views), 1), t).split(B, dim=1)
        keys = [s.key for s in views]
        return CriticPass(
            Q=dict(zip(keys, q[: len(keys)], strict=True)),
            dQ=dict(zip(keys[: len(tangent)], q[len(keys) :], strict=True)),
            Y=Y,
            features=dict(zip(keys, features.detach().split(B), strict=False)),
        )

    @torch.no_grad()
    def actor_features(self, batch: Batch, draw: Draw, known: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Convolution features of every view that an actor term names; no gradient reaches the convolutions."""
        draw, views = draw.fresh(), self.method.actor_samples()
        features = {s.key: known[s.key] for s in views if known and s.key in known}
        missing = [s for s in views if s.key not in features]
        if missing:
            new = self.nets.encoder(self.views(batch.obs, draw, missing)).split(len(batch.reward))
            features |= {s.key: part for s, part in zip(missing, new, strict=True)}
        return features

    def views(self, x: Tensor, draw: Draw, chosen: Sequence[Sample], prime: str = "") -> Tensor | Windows:
        """f_tau(x) of these samples, one after the other, for the encoder."""
        if self.nets.encoder.fused and x.dtype == torch.uint8:
            offsets = [s.view.transform.window(draw.tau[s.key + prime]) if s.view.on is None else None for s in chosen]
            if all(o is not None for o in offsets):
                return Windows(pixels_last(x), torch.cat(offsets))  # type: ignore[arg-type]
        images = [draw.image(x, s, prime) for s in chosen]
        if any(i.is_floating_point() for i in images):
            images = [as_float(i) for i in images]
        return torch.cat(images)

    def actor_pass(self, features: dict[str, Tensor], draw: Draw, std: Tensor) -> ActorPass:
        actor = ActorPass({key: self.nets.actor(f, std) for key, f in features.items()}, {}, {}, self.alpha())
        for s in (s for term in self.method.actor for s in term.acting):
            action, actor.log_pi[s.key] = actor.policy[s.key].sample(draw.noise[s.key])
            actor.Q[s.key] = self.nets.critic(features[s.key], action)
        return actor

    def alpha(self) -> Tensor:
        """The temperature, a constant for both losses; 0 for DDPG."""
        alpha = self.nets.log_alpha.detach().exp()
        return alpha if self.entropy_bonus else torch.zeros_like(alpha)

    def temperature_loss(self, log_pi: Tensor) -> Tensor:
        """alpha (entropy - target entropy), target -|A|."""
        return (self.nets.log_alpha.exp() * (-log_pi + self.action_dim)).mean()

    @torch.no_grad()
    def follow(self) -> None:
        """Polyak averaging: target <- (1 - polyak) target + polyak online."""
        online, held, c = self.nets, self.nets.target, self.config
        lerp(held.encoder, online.encoder, c.polyak_encoder)
        lerp(held.critic.head, online.critic.head, c.polyak_head)
        lerp(held.critic.q, online.critic.q, c.polyak_q)

    # -------------------------------------------------------------------------------------------- keeping

    def state(self) -> dict[str, Any]:
        return {
            "nets": self.nets.state_dict(),
            "optimizers": {k: o.state_dict() for k, o in self.optimizers.items()},
            "generator": self.generator.get_state(),
            "acting": self.acting.get_state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.nets.load_state_dict(state["nets"])
        for key, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][key])
        self.generator.set_state(state["generator"].cpu())
        self.acting.set_state(state["acting"].cpu())


def weigh(terms: Any, evaluated: Any) -> tuple[Tensor, Metrics]:
    """sum of weight x batch mean over the terms, and each term's own mean (a second one of a name is numbered)."""
    values, metrics, seen = [], Metrics(), Counter[str]()
    for term in terms:
        value = term(evaluated).mean()
        values.append(term.weight * value)
        seen[term.name] += 1
        metrics[f"{term.name}_{seen[term.name]}" if seen[term.name] > 1 else term.name] = value.detach()
    return torch.stack(values).sum(), metrics


def mean(Q: dict[str, Tensor]) -> Tensor:
    return torch.stack(list(Q.values())).detach().mean()


def step(optimizer: torch.optim.Optimizer, loss: Tensor, params: list[nn.Parameter]) -> None:
    """One optimiser step on these parameters alone: what a loss leaves elsewhere is discarded."""
    for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
        param.grad = grad
    optimizer.step()


def lerp(held: nn.Module, online: nn.Module, rate: float) -> None:
    torch._foreach_lerp_([p.data for p in held.parameters()], [p.data for p in online.parameters()], rate)
