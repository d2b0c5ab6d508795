"""The methods of the paper as recipes of the same few terms. nu, mu, eta, M, K, J as there.

Where the authors' code and the printed equation differ, the recipe follows the code that produced the paper's numbers;
the literal form is an option away (docs/deviations.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Generator, Tensor, nn

from unmoved import transforms
from unmoved.config import Config
from unmoved.envs.gym import user_function
from unmoved.errors import UserError, unknown
from unmoved.images import overlay_bank
from unmoved.losses import (
    ActorTerm,
    Bellman,
    CriticTerm,
    Draw,
    Improve,
    Method,
    PolicyKL,
    QInvariance,
    TangentProp,
    Target,
    View,
    original,
)
from unmoved.transforms import AtIdentity, Overlay, Shift, Transformation

Recipe = Callable[["Parts"], Method]


@dataclasses.dataclass(frozen=True)
class Parts:
    """A configuration with its transformations made."""

    config: Config
    weak: Transformation
    strong: Callable[[], Transformation]  # made on demand: overlay loads its images

    def nu(self, M: int) -> View:
        return View("nu", self.weak, self.config.M or M)

    def mu(self, K: int) -> View:
        """Views of s' in the target."""
        return View("mu", self.weak, self.config.K or K)

    def tangent(self, nu: View) -> TangentProp:
        c = self.config
        return TangentProp(nu, c.tangent_weight, c.tangent_twins, c.tangent_reduce)

    def kl(self, eta: View, mu: View, i: int = 0, j: int = 1) -> tuple[PolicyKL, ...]:
        """The KL between sample i of eta and sample j of mu; nothing where its weight is 0."""
        c = self.config
        return (PolicyKL(eta[i], mu[j], c.kl_weight, c.kl_stop, c.kl_units),) if c.kl_weight else ()

    def improve(self, mu: View) -> Improve:
        """Policy term on the first J samples of a view: the authors' actor sees the critic's first view."""
        return Improve(tuple(mu[j] for j in range(self.config.J)))


Term = TypeVar("Term", CriticTerm, ActorTerm)


def kept(*terms: Term) -> tuple[Term, ...]:
    """Terms of weight 0 are left out: they would only cost time."""
    return tuple(t for t in terms if t.weight)


def sac(p: Parts) -> Method:
    """No augmentation."""
    return Method("sac", Target(original), (Bellman(original),), (Improve(original),))


def rad(p: Parts) -> Method:
    """Implicit, M = K = J = 1 (Eqs. 5, 6)."""
    nu = p.nu(1)
    return Method("rad", Target(p.mu(1)), (Bellman(nu, reduce=p.config.bellman_reduce),), (p.improve(nu),))


def drqv2(p: Parts) -> Method:
    """RAD's terms; with preset drqv2, whose policy, n-step returns and schedule are DDPG's, it is DrQ-v2."""
    return dataclasses.replace(rad(p), name="drqv2")


def rad_plus(p: Parts) -> Method:
    """M = 2, K = 1, as run by the authors: two paired terms, each with its own target."""
    nu = p.nu(2)
    if p.config.K not in (None, nu.samples):
        raise UserError(f"rad_plus pairs its views: K = {p.config.K} must equal M = {nu.samples}")
    return Method("rad_plus", Target(p.mu(nu.samples), "paired"), (Bellman(nu),), (p.improve(nu),))


def rad_plus_shared(p: Parts) -> Method:
    """M = 2, K = 1 to the letter: one target sample shared by both views."""
    nu = p.nu(2)
    return Method("rad_plus_shared", Target(p.mu(1)), (Bellman(nu),), (p.improve(nu),))


def drq(p: Parts) -> Method:
    """Implicit, M = K = 2, J = 1: averaged targets."""
    nu = p.nu(2)
    return Method("drq", Target(p.mu(2)), (Bellman(nu, reduce=p.config.bellman_reduce),), (p.improve(nu),))


def drq_kl_fixed(p: Parts) -> Method:
    """DrQ and KL(sg pi(s) || pi(f(s))): the target is the policy on the original state."""
    base, nu = drq(p), p.nu(2)
    return dataclasses.replace(base, name="drq_kl_fixed", actor=(p.improve(nu), *p.kl(original, nu, 0, 0)))


def drq_kl(p: Parts) -> Method:
    """DrQ and KL(sg pi(f_1(s)) || pi(f_2(s))): the target moves with a view of its own."""
    base, nu = drq(p), p.nu(2)
    return dataclasses.replace(base, name="drq_kl", actor=(p.improve(nu), *p.kl(nu, nu)))


def drq_tp(p: Parts) -> Method:
    """DrQ and tangent prop."""
    base, nu = drq(p), p.nu(2)
    return dataclasses.replace(base, name="drq_tp", critic=kept(*base.critic, p.tangent(nu)))


def drq_tp_original(p: Parts) -> Method:
    """DrQ and tangent prop at the original states, as in its first paper."""
    base = drq(p)
    still = View("still", AtIdentity(p.weak))
    return dataclasses.replace(base, name="drq_tp_original", critic=kept(*base.critic, p.tangent(still)))


def ours(p: Parts) -> Method:
    """The proposed method on SAC: averaged targets + policy KL + tangent prop (Eqs. 11, 12, as run by the authors)."""
    return dataclasses.replace(drq_tp(p), name="ours", actor=drq_kl(p).actor)


def ours_printed(p: Parts) -> Method:
    """Eqs. 11 and 12 to the letter, the square kept: policy term and KL on the same view mu, target on eta, tangent
    prop averaged over views of its own, exact KL."""
    c, nu = p.config, p.nu(2)
    act, eta = View("act", p.weak, c.J), View("eta", p.weak, 1)
    tangent = View("tangent", p.weak, nu.samples)
    return Method(
        "ours_printed",
        Target(p.mu(2)),
        kept(Bellman(nu), TangentProp(tangent, c.tangent_weight, c.tangent_twins, "mean")),
        kept(Improve(act), PolicyKL(eta, act, c.kl_weight, c.kl_stop, "exact")),
    )


def ours_ddpg(p: Parts) -> Method:
    """The proposed method on DDPG. With tangent prop the authors draw fresh views for the critic."""
    nu = p.nu(2)
    act = View("act", p.weak, 2) if p.config.tangent_weight else nu
    return Method(
        "ours",
        Target(p.mu(2)),
        kept(Bellman(nu), p.tangent(nu)),
        (p.improve(act), *p.kl(act, act)),
    )


def drac(p: Parts) -> Method:
    """Explicit regularisation as run by the authors: (Bellman(s) + w Bellman(f(s))) / 2 on y, KL to pi(.|s)."""
    nu, w = p.nu(1), p.config.explicit_weight
    return Method(
        "drac",
        Target(original),
        kept(Bellman(original, 0.5), Bellman(nu, 0.5 * w)),
        (Improve(original), *p.kl(original, nu, 0, 0)),
    )


def drac_printed(p: Parts) -> Method:
    """Explicit regularisation to the letter (Eqs. 3, 4): views are pulled to sg Q(s, a)."""
    nu, w = p.nu(1), p.config.explicit_weight
    return Method(
        "drac_printed",
        Target(original),
        kept(Bellman(original), QInvariance(nu, w)),
        (Improve(original), *p.kl(original, nu, 0, 0)),
    )


def svea(p: Parts) -> Method:
    """A weak and a strong view regress on one weak target; the strong one is taken on the weak one."""
    c, nu = p.config, p.nu(1)
    mu = p.mu(1) if c.weak_in_target else original
    target = View("strong", p.strong(), mu.samples, on=mu) if c.strong_in_target else mu
    terms = [Bellman(nu, 1 - c.strong_weight)]
    if c.strong_weight:  # made only where it counts: overlay loads its images
        terms.append(Bellman(View("strong", p.strong(), on=nu[0]), c.strong_weight))
    return Method("svea", Target(target), kept(*terms), (p.improve(nu),))


def ours_dmgb(p: Parts) -> Method:
    """The proposed method for generalisation: SVEA's two types of nu, averaged targets, KL and tangent prop."""
    c, nu = p.config, p.nu(2)
    strong = View("strong", p.strong(), on=nu[0])
    terms: list[CriticTerm] = [Bellman(nu, 1 - c.strong_weight), Bellman(strong, c.strong_weight)]
    terms.append(TangentProp(nu[0], c.tangent_weight, c.tangent_twins, c.tangent_reduce))
    if c.overlay_tangent_weight:
        mix = View("mix", Overlay(_bank(strong.transform), (0.0, 0.5), c.image_size), on=nu[0])
        terms.append(TangentProp(mix, c.overlay_tangent_weight, c.tangent_twins, c.tangent_reduce))
    return Method("ours", Target(p.mu(2)), kept(*terms), (p.improve(nu), *p.kl(nu, nu)))


def ours_pda(p: Parts) -> Method:
    """The authors' benchmark code: tangent prop 0.2 along the shift and 0.2 along overlay's mixing weight."""
    config = dataclasses.replace(p.config, tangent_weight=0.2, overlay_tangent_weight=0.2)
    return dataclasses.replace(ours_dmgb(dataclasses.replace(p, config=config)), name="ours_pda")


def _bank(transform: Transformation) -> Tensor:
    if not isinstance(transform, Overlay):
        raise UserError(f"the tangent along the mixing weight needs overlay as the strong view, not {transform.name}")
    return transform.bank


RECIPES: tuple[Recipe, ...] = (
    sac, rad, rad_plus, rad_plus_shared, drq, drq_kl_fixed, drq_kl, drq_tp, drq_tp_original, ours, ours_printed,
    ours_pda, drac, drac_printed, svea, drqv2,
)  # fmt: skip
METHODS = {recipe.__name__: recipe for recipe in RECIPES}


def make_transform(name: str, config: Config) -> Transformation:
    """A family by name, as the recipes use it: 'overlay', 'shift+rotate', or a user's own as module:function, where
    function is a class or makes a Transformation or an nn.Module."""
    if "+" in name:
        return transforms.Compose(*(make_transform(part, config) for part in name.split("+")))
    made: dict[str, Callable[[], Transformation]] = {
        "identity": transforms.Identity,
        "shift": lambda: Shift(config.pad, config.tangent_form),
        "overlay": lambda: Overlay(overlay_bank(config.overlay), size=config.image_size),
        "conv": transforms.Conv,
        "rotate": transforms.Rotate,
        "blur": transforms.Blur,
        "cutout": lambda: transforms.Cutout(size=config.image_size),
        "cutout_color": lambda: transforms.Cutout(colour=True, size=config.image_size),
        "grayscale": transforms.Grayscale,
        "flip": transforms.Flip,
        "jitter": transforms.ColorJitter,
    }
    if ":" in name:
        return user_transform(name)
    if name not in made:
        unknown("transformation", name, made)
    return made[name]()


def user_transform(name: str) -> Transformation:
    module, _, function = name.partition(":")
    made = user_function(module, function)()
    if isinstance(made, nn.Module):
        return transforms.FromModule(made)
    if not isinstance(made, Transformation):
        raise UserError(f"{name} made a {type(made).__name__}, not a Transformation or an nn.Module")
    return made


def try_out(method: Method, config: Config) -> None:
    """Transform one black image as an update would: what a family cannot do shows here, not after an hour."""
    draw = Draw.sample(method, 1, 1, Generator().manual_seed(0))
    image = torch.zeros(1, 3, config.image_size, config.image_size)
    for s in (*method.critic_samples(), *method.actor_samples()):
        draw.image(image, s)
    for s in method.tangent_samples():
        draw.tangent(image, s)


def find_recipe(config: Config) -> Recipe:
    """`ours` is the preset's: on SAC, on DDPG, or for the generalisation benchmark."""
    if config.method not in METHODS:
        unknown("method", config.method, METHODS)
    if config.method == "ours":
        by_policy: dict[str, Recipe] = {"clipped": ours_ddpg, "tanh_dmgb": ours_dmgb}
        return by_policy.get(config.policy, ours)
    return METHODS[config.method]


def make_method(config: Config) -> Method:
    """The recipe of a configuration, with its numbers."""
    recipe = find_recipe(config)
    parts = Parts(config, make_transform(config.weak, config), lambda: make_transform(config.strong, config))
    try:
        method = dataclasses.replace(recipe(parts), name=config.method)
        try_out(method, config)
        return method
    except TypeError as error:
        raise UserError(f"{config.method} cannot use these transformations: {error}") from None
    except IndexError as error:
        raise UserError(f"{config.method} needs more views than M = {config.M}, J = {config.J}: {error}") from None
