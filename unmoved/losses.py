"""The summands of the two losses, and what they are evaluated on. One equation, one home.

Notation of the paper: f_tau a transformation, nu the views of s in the critic's loss, mu those of s' in the target (and
of s in the actor's loss), eta the views that give the KL its target; M, K, J how many of each; Q_bar the target critic;
y(s') = r + gamma (min Q_bar(s', a') - alpha log pi(a'|s')), Y the target that the critic regresses on. Shapes: B states
and 2 twins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Generator, Tensor

from unmoved.errors import UserError
from unmoved.networks import ClippedNormal, Policy
from unmoved.transforms import Identity, Tau, Transformation

# ------------------------------------------------------------------------------------------------ views and draws


@dataclass(frozen=True, eq=False)
class View:
    """A random transformation of the state and how many samples of it are drawn. Its name is its identity."""

    name: str
    transform: Transformation
    samples: int = 1
    on: View | Sample | None = None  # taken on another view's pixels instead of the state's

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.samples:
            raise IndexError(f"view {self.name} has {self.samples} sample(s), asked for number {index}")
        return Sample(self, index)

    def base(self, index: int) -> Sample | None:
        return self.on[index % self.on.samples] if isinstance(self.on, View) else self.on

    def same_as(self, other: View) -> bool:
        """Whether both stand for the same samples: of one family, with the same settings, on the same pixels."""
        return self._description() == other._description()

    def _description(self) -> tuple[object, ...]:
        plain = (int, float, str, tuple)  # anything else, such as a bank of images, is the same if it is one object
        settings = {k: v if isinstance(v, plain) else id(v) for k, v in vars(self.transform).items()}
        bases = [b and b.key for b in map(self.base, range(self.samples))]
        return type(self.transform), settings, bases


@dataclass(frozen=True, eq=False)
class Sample:
    """One of a view's samples. Its key, such as `nu0`, names its pixels, its parameter and its action noise."""

    view: View
    index: int

    @property
    def key(self) -> str:
        return f"{self.view.name}{self.index}"


Views = View | Sample | tuple["View | Sample", ...]
original = View("original", Identity())


def samples(views: Views) -> tuple[Sample, ...]:
    if isinstance(views, Sample):
        return (views,)
    if isinstance(views, View):
        return tuple(views[i] for i in range(views.samples))
    return tuple(s for v in views for s in samples(v))


def unique(chosen: Iterable[Sample]) -> list[Sample]:
    return list({s.key: s for s in chosen}.values())


def names(views: Views) -> str:
    if isinstance(views, Sample):
        return f"{views.view.name}{views.index + 1}"
    return views.name if isinstance(views, View) else ",".join(names(v) for v in views)


@dataclass
class Draw:
    """One update's randomness, by sample key; keys of views of s' end in a prime. The update is a function of it."""

    tau: dict[str, Tau]
    direction: dict[str, Tensor]  # of the tangents
    noise: dict[str, Tensor]  # (B, |A|) standard normal, of the actions
    pixels: dict[str, Tensor] = field(default_factory=dict)  # of the present pass

    def fresh(self) -> Draw:
        """The same draw at the start of a pass. Within it two terms that name the same view share its pixels; kept for
        longer they would have to be written to memory, where a compiled pass makes them as it reads them."""
        return Draw(self.tau, self.direction, self.noise)

    @staticmethod
    def sample(method: Method, batch: int, action_dim: int, generator: Generator) -> Draw:
        draw = Draw({}, {}, {})

        def noise() -> Tensor:
            return torch.randn(batch, action_dim, generator=generator, device=generator.device)

        for s in with_bases(method.critic_samples() + method.actor_samples()):
            draw.tau[s.key] = s.view.transform.sample(batch, generator)
        for s in with_bases(samples(method.target.mu)):
            draw.tau[s.key + "'"] = s.view.transform.sample(batch, generator)
        for s in samples(method.target.mu):
            draw.noise[s.key + "'"] = noise()
        for s in unique(s for term in method.actor for s in term.acting):
            draw.noise[s.key] = noise()
        for s in method.tangent_samples():
            draw.direction[s.key] = s.view.transform.direction(generator)
        return draw

    def image(self, x: Tensor, s: Sample, prime: str = "") -> Tensor:
        """f_tau(x) for this sample's tau, (B, C, H, W)."""
        key = s.key + prime
        if key not in self.pixels:
            self.pixels[key] = s.view.transform(self._base(x, s, prime), self.tau[key])
        return self.pixels[key]

    def tangent(self, x: Tensor, s: Sample) -> Tensor:
        """df_tau(x)/dtau along the drawn direction, (B, C, H, W)."""
        return s.view.transform.tangent(self._base(x, s, ""), self.tau[s.key], self.direction[s.key])

    def _base(self, x: Tensor, s: Sample, prime: str) -> Tensor:
        base = s.view.base(s.index)
        return x if base is None else self.image(x, base, prime)


def with_bases(chosen: Iterable[Sample], all_of_them: bool = False) -> list[Sample]:
    """The samples and those they are taken on, bases first; each key once unless all are asked for."""
    out: list[Sample] = []
    for s in chosen:
        base = s.view.base(s.index)
        out += with_bases([base], all_of_them) if base is not None else []
        out.append(s)
    return out if all_of_them else unique(out)


# ------------------------------------------------------------------------------------------------ the target Y


def soft_target(reward: Tensor, discount: Tensor, Q: Tensor, alpha: Tensor, log_pi: Tensor) -> Tensor:
    """y = r + gamma (min Q_bar - alpha log pi), the entropy inside gamma; `discount` is 0 after a termination. (B,)"""
    assert Q.shape == (2, *reward.shape) and discount.shape == log_pi.shape == reward.shape
    return reward + discount * (Q.amin(0) - alpha * log_pi)


@dataclass(frozen=True)
class Target:
    """Y = mean_k y(f_{mu_k}(s')): the K samples averaged, or `paired`, the k-th for the k-th sample of nu (RAD+)."""

    mu: Views
    combine: str = "average"

    def __post_init__(self) -> None:
        assert self.combine in ("average", "paired")

    def __call__(self, y: Tensor) -> Tensor:
        """(K, B) -> (1, B) or (K, B)."""
        return y.mean(0, keepdim=True) if self.combine == "average" else y

    def __str__(self) -> str:
        k = len(samples(self.mu))
        if self.combine == "paired":
            return f"Y_k = y(f_{names(self.mu)}k(s')), k = 1..{k}, paired with the samples of nu"
        return f"Y = y(f_{names(self.mu)}(s'))" if k == 1 else f"Y = 1/{k} sum_k y(f_{names(self.mu)}k(s'))"


# ------------------------------------------------------------------------------------------------ the critic's terms


@dataclass
class CriticPass:
    """What a critic term may look at, evaluated in one encoder pass, by sample key."""

    Q: dict[str, Tensor]  # (2, B) at the replayed action
    dQ: dict[str, Tensor]  # (2, B) dQ(f_tau(s), a)/dtau
    Y: Tensor  # (1, B), or (K, B) when paired
    features: dict[str, Tensor] = field(default_factory=dict)  # (B, F) of the convolutions, without gradient


class CriticTerm(Protocol):
    @property
    def weight(self) -> float: ...
    @property
    def name(self) -> str: ...
    @property
    def needs(self) -> tuple[Sample, ...]: ...
    @property
    def tangents(self) -> tuple[Sample, ...]: ...
    def __call__(self, critic: CriticPass) -> Tensor: ...


def over(values: list[Tensor], reduce: str) -> Tensor:
    """Mean (the authors') or sum (DrQ's release) over the samples of a view."""
    assert reduce in ("mean", "sum")
    total = torch.stack(values).sum(0)
    return total / len(values) if reduce == "mean" else total


@dataclass(frozen=True)
class Bellman:
    """E_nu (Q(f_nu(s), a) - Y)^2, summed over the twins. Eqs. 5, 7 and 11."""

    nu: Views
    weight: float = 1.0
    reduce: str = "mean"

    @property
    def name(self) -> str:
        return f"bellman_{names(self.nu)}"

    @property
    def needs(self) -> tuple[Sample, ...]:
        return samples(self.nu)

    @property
    def tangents(self) -> tuple[Sample, ...]:
        return ()

    def __call__(self, critic: CriticPass) -> Tensor:
        Q = [critic.Q[s.key] for s in samples(self.nu)]
        assert len(critic.Y) in (1, len(Q)), "paired targets need as many samples of mu as of nu"
        Y = critic.Y.expand(len(Q), -1)
        assert Q[0].shape == (2, Y.shape[1])
        return over([(q - y).square().sum(0) for q, y in zip(Q, Y, strict=True)], self.reduce)

    def __str__(self) -> str:
        return f"{self.reduce}_{names(self.nu)}[{len(samples(self.nu))}] (Q(f_{names(self.nu)}(s), a) - Y)^2"


@dataclass(frozen=True)
class QInvariance:
    """E_nu (Q(f_nu(s), a) - sg Q(s, a))^2, summed over the twins: the explicit regulariser of Eq. 3."""

    nu: Views
    weight: float = 1.0
    anchor: View = original

    @property
    def name(self) -> str:
        return f"q_invariance_{names(self.nu)}"

    @property
    def needs(self) -> tuple[Sample, ...]:
        return (*samples(self.nu), self.anchor[0])

    @property
    def tangents(self) -> tuple[Sample, ...]:
        return ()

    def __call__(self, critic: CriticPass) -> Tensor:
        anchor = critic.Q[self.anchor[0].key].detach()
        assert anchor.ndim == 2 and anchor.shape[0] == 2
        return over([(critic.Q[s.key] - anchor).square().sum(0) for s in samples(self.nu)], "mean")

    def __str__(self) -> str:
        return f"mean_{names(self.nu)}[{len(samples(self.nu))}] (Q(f_{names(self.nu)}(s), a) - sg Q(s, a))^2"


@dataclass(frozen=True)
class TangentProp:
    """E_nu (dQ(f_nu(s), a)/dnu)^2. Eq. 11 with the square that its print lacks, Eq. 15 for the tangent.

    twins: derivative of the smaller Q (`min`, the authors'), of their mean (`mean`), or the mean over the two squares
    (`each`). reduce: the authors sum over the samples of the view. square=False is the printed form.
    """

    nu: Views
    weight: float = 1.0
    twins: str = "min"
    reduce: str = "sum"
    square: bool = True

    @property
    def name(self) -> str:
        return f"tangent_{names(self.nu)}"

    @property
    def needs(self) -> tuple[Sample, ...]:
        return samples(self.nu)

    @property
    def tangents(self) -> tuple[Sample, ...]:
        return samples(self.nu)

    def derivative(self, Q: Tensor, dQ: Tensor) -> Tensor:
        """(2, B), (2, B) -> (1, B) or (2, B)."""
        assert Q.shape == dQ.shape and Q.shape[0] == 2 and self.twins in ("min", "mean", "each")
        if self.twins == "min":
            return torch.where(Q[0] <= Q[1], dQ[0], dQ[1])[None]
        return dQ.mean(0, keepdim=True) if self.twins == "mean" else dQ

    def __call__(self, critic: CriticPass) -> Tensor:
        d = [self.derivative(critic.Q[s.key], critic.dQ[s.key]) for s in samples(self.nu)]
        return over([(x.square() if self.square else x).mean(0) for x in d], self.reduce)

    def __str__(self) -> str:
        square = "^2" if self.square else ""
        q = {"min": "min(Q1,Q2)", "mean": "(Q1+Q2)/2", "each": "Q"}[self.twins]
        v = names(self.nu)
        return f"{self.reduce}_{v}[{len(samples(self.nu))}] (d/dtau {q}(f_tau(s), a) at {v}){square}"


# ------------------------------------------------------------------------------------------------ the actor's terms


@dataclass
class ActorPass:
    """What an actor term may look at, by sample key. Features are detached from the convolutions."""

    policy: dict[str, Policy]
    log_pi: dict[str, Tensor]  # (B,) of the action sampled at that view
    Q: dict[str, Tensor]  # (2, B) of that action at that view
    alpha: Tensor  # ()


class ActorTerm(Protocol):
    @property
    def weight(self) -> float: ...
    @property
    def name(self) -> str: ...
    @property
    def needs(self) -> tuple[Sample, ...]: ...
    @property
    def acting(self) -> tuple[Sample, ...]: ...
    def __call__(self, actor: ActorPass) -> Tensor: ...


@dataclass(frozen=True)
class Improve:
    """E_mu [alpha log pi(a^|f_mu(s)) - min Q(f_mu(s), a^)], a^ ~ pi(.|f_mu(s)). Eq. 6; DDPG has alpha = 0."""

    mu: Views
    weight: float = 1.0

    @property
    def name(self) -> str:
        return f"improve_{names(self.mu)}"

    @property
    def needs(self) -> tuple[Sample, ...]:
        return samples(self.mu)

    @property
    def acting(self) -> tuple[Sample, ...]:
        return samples(self.mu)

    def __call__(self, actor: ActorPass) -> Tensor:
        for s in samples(self.mu):
            assert actor.Q[s.key].shape == (2, *actor.log_pi[s.key].shape)
        return over([actor.alpha * actor.log_pi[s.key] - actor.Q[s.key].amin(0) for s in samples(self.mu)], "mean")

    def __str__(self) -> str:
        v = names(self.mu)
        return f"mean_{v}[{len(samples(self.mu))}] (alpha log pi(a^|f_{v}(s)) - min(Q1,Q2)(f_{v}(s), a^))"


def gaussian_kl(mu_p: Tensor, std_p: Tensor, mu_q: Tensor, std_q: Tensor) -> Tensor:
    """KL(N(mu_p, std_p) || N(mu_q, std_q)) per dimension."""
    ratio = std_p / std_q
    return 0.5 * (ratio.square() + ((mu_p - mu_q) / std_q).square() - 1) - ratio.log()


def policy_distance(p: Policy, q: Policy, units: str) -> Tensor:
    """How far policy q is from p, (B,).

    exact: KL(p || q). The tanh is a bijection, so it is the KL of the Gaussians before it, summed over the dimensions.
    author: mean over dimensions of the KL of N(tanh mu, std), the units of the paper's weights and tables.
    squared: mean over dimensions of the squared distance of the mean actions (DDPG's analogue).
    """
    assert p.mu.shape == q.mu.shape and p.mu.ndim == 2
    if units == "exact":
        return gaussian_kl(p.mu, p.std, q.mu, q.std).sum(-1)
    if units == "author":
        return gaussian_kl(p.mean, p.std, q.mean, q.std).mean(-1)
    assert units == "squared", units
    return (p.mean - q.mean).square().mean(-1)


def average_policy(policies: list[Policy]) -> Policy:
    """The Gaussian with the mixture's mean and variance (Eq. 10 prints the law of a weighted sum instead)."""
    mu = torch.stack([p.mu for p in policies])
    variance = torch.stack([p.std.square() for p in policies]).mean(0) + mu.var(0, correction=0)
    first = policies[0]
    if isinstance(first, ClippedNormal):
        return ClippedNormal(mu.mean(0), variance.sqrt(), first.clip, first.eps)
    return type(first)(mu.mean(0), variance.sqrt())


@dataclass(frozen=True)
class PolicyKL:
    """E_mu E_eta KL(sg pi(.|f_eta(s)) || pi(.|f_mu(s))). Eqs. 4 (eta the original), 9 and 12.

    stop: the side without gradient, `first` (the paper's choice), `second` or `none`. average: one KL to the averaged
    policy of the eta samples instead of the average of their KLs.
    """

    eta: Views
    mu: Views
    weight: float = 1.0
    stop: str = "first"
    units: str = "author"
    average: bool = False

    def __post_init__(self) -> None:
        assert self.stop in ("first", "second", "none") and self.units in ("author", "exact", "squared")

    @property
    def name(self) -> str:
        return f"kl_{names(self.eta)}_{names(self.mu)}"

    @property
    def needs(self) -> tuple[Sample, ...]:
        return (*samples(self.eta), *samples(self.mu))

    @property
    def acting(self) -> tuple[Sample, ...]:
        return ()

    def distance(self, actor: ActorPass, units: str) -> Tensor:
        targets = [actor.policy[s.key] for s in samples(self.eta)]
        if self.average:
            targets = [average_policy(targets)]
        pairs = [(p, actor.policy[s.key]) for p in targets for s in samples(self.mu)]
        if self.stop != "none":
            pairs = [(p.detach(), q) if self.stop == "first" else (p, q.detach()) for p, q in pairs]
        return over([policy_distance(p, q, units) for p, q in pairs], "mean")

    def __call__(self, actor: ActorPass) -> Tensor:
        return self.distance(actor, self.units)

    def __str__(self) -> str:
        p, q = f"pi(.|f_{names(self.eta)}(s))", f"pi(.|f_{names(self.mu)}(s))"
        p = f"avg {p}" if self.average else p
        p, q = (f"sg {p}" if self.stop == "first" else p), (f"sg {q}" if self.stop == "second" else q)
        return f"|{p} - {q}|^2" if self.units == "squared" else f"KL_{self.units}({p} || {q})"


# ------------------------------------------------------------------------------------------------ methods


@dataclass(frozen=True)
class Method:
    """A recipe: the target and the summands of the two losses."""

    name: str
    target: Target
    critic: tuple[CriticTerm, ...]
    actor: tuple[ActorTerm, ...]

    def __post_init__(self) -> None:
        """A view is known by its name, so one name must not mean two views."""
        for used in ([*self.critic_samples(), *self.actor_samples()], samples(self.target.mu)):
            seen: dict[str, View] = {}
            for s in with_bases(used, all_of_them=True):
                first = seen.setdefault(s.view.name, s.view)
                if not first.same_as(s.view):
                    raise UserError(
                        f"two different views of {self.name} are called {s.view.name}: make one view and name it in "
                        "both terms, or give them two names."
                    )

    def check_whole(self) -> None:
        """A critic can be studied alone, but training needs both losses and an action to value."""
        if not self.critic or not any(term.acting for term in self.actor):
            raise UserError(f"{self.name} needs a critic term such as Bellman and a policy term, Improve.")

    def capturable(self) -> bool:
        """Whether every transformation stays on the GPU, so that an update can be a CUDA graph."""
        used = [*self.critic_samples(), *self.actor_samples(), *samples(self.target.mu)]
        return all(s.view.transform.capturable for s in with_bases(used, all_of_them=True))

    def critic_samples(self) -> list[Sample]:
        return unique(s for term in self.critic for s in term.needs)

    def tangent_samples(self) -> list[Sample]:
        return unique(s for term in self.critic for s in term.tangents)

    def actor_samples(self) -> list[Sample]:
        return unique(s for term in self.actor for s in term.needs)

    def __str__(self) -> str:
        def loss(terms: Iterable[CriticTerm | ActorTerm]) -> str:
            return "\n      + ".join(f"{term.weight:g} {term}" for term in terms)

        return f"target  {self.target}\ncritic  {loss(self.critic)}\nactor   {loss(self.actor)}"
