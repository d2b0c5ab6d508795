"""The recipes: each builds and updates under every preset, and is what the paper's method matrix says."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from unmoved import methods
from unmoved.agent import Agent, Batch, Metrics, weigh
from unmoved.config import PRESETS, Config, make_config
from unmoved.errors import UserError
from unmoved.images import generated_bank
from unmoved.losses import (
    ActorPass,
    Bellman,
    CriticPass,
    Draw,
    Improve,
    Method,
    PolicyKL,
    QInvariance,
    TangentProp,
    Target,
    View,
    original,
    samples,
)
from unmoved.methods import METHODS, make_method, make_transform
from unmoved.networks import TanhNormal
from unmoved.train import train
from unmoved.transforms import AtIdentity, Blur, Compose, Conv, Cutout, Flip, Identity, Mixture, Overlay, Rotate, Shift

SIZE = 32


@pytest.fixture(autouse=True)
def small_bank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generated bank is 0.1 s a time; it has tests of its own."""
    bank = lru_cache(lambda folder: generated_bank(4, 40))
    monkeypatch.setattr(methods, "overlay_bank", bank)


def tiny(preset: str = "drq", task: str = "cheetah_run", **changes: Any) -> Config:
    small = {"filters": 4, "hidden_dim": 16, "feature_dim": 8, "image_size": SIZE, "batch_size": 4, "strides": (2, 1)}
    return make_config(task, preset=preset, **(small | changes))


def pictures(seed: int, n: int = 4) -> Tensor:
    return torch.randint(256, (n, 9, SIZE, SIZE), generator=Generator().manual_seed(seed), dtype=torch.uint8)


def batch() -> Batch:
    g = Generator().manual_seed(3)
    action, reward = 2 * torch.rand(4, 2, generator=g) - 1, torch.rand(4, generator=g)
    return Batch(pictures(1), action, reward, torch.tensor([0.99, 0.99, 0.0, 0.99]), pictures(2))


def update(config: Config, method: Method) -> tuple[Agent, Metrics]:
    agent = Agent(config, method, (9, SIZE, SIZE), 2)
    draw = Draw.sample(method, 4, 2, agent.generator)
    return agent, agent.update(batch(), draw, torch.tensor(0.5))


# ------------------------------------------------------------------------------------------------ all of them


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_updates_under_every_preset(name: str, preset: str) -> None:
    config = tiny(preset, method=name)
    method = make_method(config)
    assert method.name == name
    fresh = Agent(config, method, (9, SIZE, SIZE), 2).nets.state_dict()
    agent, metrics = update(config, method)
    assert all(torch.isfinite(v).all() and v.ndim == 0 for v in metrics.values()), metrics
    assert {t.name for t in (*method.critic, *method.actor)} <= set(metrics)
    assert {"critic_loss", "actor_loss", "target_mean", "q_mean"} <= set(metrics)
    assert ({"entropy", "alpha"} <= set(metrics)) == (config.policy != "clipped"), "DDPG has no temperature"
    state = agent.nets.state_dict()
    assert all(v.isfinite().all() for v in state.values())
    still = {k for k in state if torch.equal(state[k], fresh[k])}
    assert still <= ({"log_alpha"} if preset == "drqv2" else set()), still  # DDPG has no temperature


def test_a_term_is_reported_with_its_weight_in_the_loss() -> None:
    config = tiny(method="ours", kl_weight=0.3, tangent_weight=0.7)
    _, m = update(config, make_method(config))
    assert m["critic_loss"].item() == pytest.approx((m["bellman_nu"] + 0.7 * m["tangent_nu"]).item(), rel=1e-5)
    assert m["actor_loss"].item() == pytest.approx((m["improve_nu1"] + 0.3 * m["kl_nu1_nu2"]).item(), rel=1e-5)
    assert torch.equal(m["kl_nu1_nu2"], m["kl_author"]) and m["kl_exact"] > 0


# ------------------------------------------------------------------------------------------------ the matrix


def critic_weights(method: Method) -> dict[str, float]:
    """Each view's weight in the regression: the loss when its twins alone miss the target by 1, per twin."""
    keys, K = [s.key for s in method.critic_samples()], len(samples(method.target.mu))
    Y = torch.zeros(K if method.target.combine == "paired" else 1, 2)

    def loss(key: str) -> float:
        Q = {k: torch.full((2, 2), float(k == key)) for k in keys}
        return weigh(method.critic, CriticPass(Q, {k: torch.zeros(2, 2) for k in keys}, Y))[0].item() / 2

    return {k: w for k in keys if (w := round(loss(k), 6))}


def tangent_weights(method: Method) -> dict[str, float]:
    """Each view's weight in tangent prop: the loss when it alone has a derivative of 1."""
    zero = {s.key: torch.zeros(2, 2) for s in method.critic_samples()}
    K = len(samples(method.target.mu)) if method.target.combine == "paired" else 1

    def loss(key: str) -> float:
        return weigh(method.critic, CriticPass(zero, zero | {key: torch.ones(2, 2)}, torch.zeros(K, 2)))[0].item()

    return {s.key: round(loss(s.key), 6) for s in method.tangent_samples()}


def summary(method: Method) -> dict[str, Any]:
    kl = [(samples(t.eta)[0].key, samples(t.mu)[0].key, t.weight) for t in method.actor if isinstance(t, PolicyKL)]
    return {
        "nu": critic_weights(method),
        "mu": [s.key for s in samples(method.target.mu)],
        "combine": method.target.combine if len(samples(method.target.mu)) > 1 else None,
        "acts": [s.key for t in method.actor for s in t.acting],
        "kl": kl,
        "tangent": tangent_weights(method),
    }


TWO, MEAN = {"nu0": 0.5, "nu1": 0.5}, {"mu": ["mu0", "mu1"], "combine": "average"}
NONE: dict[str, Any] = {"combine": None, "kl": [], "tangent": {}, "acts": ["nu0"], "mu": ["mu0"]}
MOVING, FIXED = ("nu0", "nu1", 0.1), ("original0", "nu0", 0.1)
MATRIX: dict[tuple[str, str], dict[str, Any]] = {
    ("drq", "sac"): NONE | {"nu": {"original0": 1}, "mu": ["original0"], "acts": ["original0"]},
    ("drq", "rad"): NONE | {"nu": {"nu0": 1}},
    ("drq", "rad_plus"): NONE | {"nu": TWO, "mu": ["mu0", "mu1"], "combine": "paired"},
    ("drq", "rad_plus_shared"): NONE | {"nu": TWO},
    ("drq", "drq"): NONE | MEAN | {"nu": TWO},
    ("drq", "drq_kl_fixed"): NONE | MEAN | {"nu": TWO, "kl": [FIXED]},
    ("drq", "drq_kl"): NONE | MEAN | {"nu": TWO, "kl": [MOVING]},
    ("drq", "drq_tp"): NONE | MEAN | {"nu": TWO, "tangent": {"nu0": 0.1, "nu1": 0.1}},
    ("drq", "drq_tp_original"): NONE | MEAN | {"nu": TWO, "tangent": {"still0": 0.1}},
    ("drq", "ours"): NONE | MEAN | {"nu": TWO, "kl": [MOVING], "tangent": {"nu0": 0.1, "nu1": 0.1}},
    ("drq", "ours_printed"): NONE | MEAN | {"nu": TWO, "acts": ["act0"], "kl": [("eta0", "act0", 0.1)],
                                            "tangent": {"tangent0": 0.05, "tangent1": 0.05}},
    ("drq", "drac"): NONE | {"nu": {"original0": 0.5, "nu0": 0.1}, "mu": ["original0"], "acts": ["original0"],
                             "kl": [FIXED]},
    ("drq", "svea"): NONE | {"nu": {"nu0": 0.5, "strong0": 0.5}},
    ("dmgb", "svea"): NONE | {"nu": {"nu0": 0.5, "strong0": 0.5}},
    ("dmgb", "ours"): NONE | MEAN | {"nu": {"nu0": 0.25, "nu1": 0.25, "strong0": 0.5}, "kl": [MOVING],
                                     "tangent": {"nu0": 0.5}},
    ("dmgb", "ours_pda"): NONE | MEAN | {"nu": {"nu0": 0.25, "nu1": 0.25, "strong0": 0.5}, "kl": [MOVING],
                                         "tangent": {"nu0": 0.2, "mix0": 0.2}},
    ("drqv2", "drqv2"): NONE | {"nu": {"nu0": 1}},
    ("drqv2", "ours"): NONE | MEAN | {"nu": TWO, "acts": ["act0"], "kl": [("act0", "act1", 0.1)],
                                      "tangent": {"nu0": 0.1, "nu1": 0.1}},
}  # fmt: skip


@pytest.mark.parametrize(("preset", "name"), MATRIX)
def test_method_matrix(preset: str, name: str) -> None:
    method = make_method(tiny(preset, method=name))
    assert summary(method) == MATRIX[preset, name]
    for term in method.actor:
        if isinstance(term, PolicyKL):
            assert term.stop == "first" and term.units == ("exact" if name == "ours_printed" else "author")
    for term in method.critic:
        if isinstance(term, TangentProp):
            assert (term.twins, term.square) == ("min", True)
    weak = {s.view.transform for s in method.critic_samples() if s.view.name in ("nu", "mu", "act", "eta")}
    assert all(isinstance(t, Shift) and t.pad == 4 for t in weak)


def test_paired_targets_meet_their_own_view() -> None:
    method = make_method(tiny(method="rad_plus"))
    Q = {"nu0": torch.full((2, 1), 3.0), "nu1": torch.full((2, 1), 5.0)}
    loss = weigh(method.critic, CriticPass(Q, {}, torch.tensor([[3.0], [5.0]])))[0]
    assert loss == 0 and weigh(method.critic, CriticPass(Q, {}, torch.tensor([[5.0], [3.0]])))[0] == 8


def test_drac_printed_pulls_views_to_the_critic_itself() -> None:
    method = make_method(tiny(method="drac_printed"))
    bellman, pull = method.critic
    assert isinstance(bellman, Bellman) and samples(bellman.nu)[0].key == "original0" and bellman.weight == 1
    assert isinstance(pull, QInvariance) and pull.weight == 0.2 and samples(pull.nu)[0].key == "nu0"
    assert summary(method)["kl"] == [FIXED] and summary(method)["mu"] == ["original0"]


def test_the_strong_view_lies_on_the_first_weak_one() -> None:
    for preset, name in (("dmgb", "svea"), ("dmgb", "ours"), ("drq", "svea")):
        method = make_method(tiny(preset, method=name))
        strong = next(s for s in method.critic_samples() if s.key == "strong0")
        assert isinstance(strong.view.transform, Overlay) and strong.view.transform.weight == 0.5
        draw, x = Draw.sample(method, 4, 2, Generator().manual_seed(0)), pictures(1)
        base = Shift()(x, draw.tau["nu0"])
        assert torch.equal(draw.image(x, strong), strong.view.transform(base, draw.tau["strong0"]))


def test_strong_transformation_in_the_target() -> None:
    method = make_method(tiny("dmgb", method="svea", strong="conv", strong_in_target=True))
    assert summary(method)["mu"] == ["strong0"] and summary(method)["nu"] == {"nu0": 0.5, "strong0": 0.5}
    draw, x = Draw.sample(method, 4, 2, Generator().manual_seed(0)), pictures(1)
    image = draw.image(x, samples(method.target.mu)[0], "'")
    assert torch.equal(image, Conv()(Shift()(x, draw.tau["mu0'"]), draw.tau["strong0'"]))
    assert not torch.equal(draw.tau["strong0'"], draw.tau["strong0"])
    plain = make_method(tiny("dmgb", method="svea", strong="conv"))
    assert summary(plain)["mu"] == ["mu0"]


def test_the_overlays_tangent_is_taken_along_its_mixing_weight() -> None:
    method = make_method(tiny("dmgb", method="ours", overlay_tangent_weight=0.3))
    assert summary(method)["tangent"] == {"nu0": 0.5, "mix0": 0.3}
    mix = next(s for s in method.tangent_samples() if s.key == "mix0")
    base = mix.view.base(0)
    assert isinstance(mix.view.transform, Overlay) and mix.view.transform.weight == (0.0, 0.5)
    assert base is not None and base.key == "nu0"


def test_ddpg_without_tangent_prop_draws_no_fresh_views() -> None:
    got = summary(make_method(tiny("drqv2", method="ours", tangent_weight=0.0)))
    assert got["acts"] == ["nu0"] and got["kl"] == [MOVING] and got["tangent"] == {}


# ------------------------------------------------------------------------------------------------ options


def test_numbers_of_views() -> None:
    method = make_method(tiny(method="drq", M=3, K=4, J=2))
    got = summary(method)
    assert got["nu"] == {f"nu{i}": pytest.approx(1 / 3, abs=1e-5) for i in range(3)}
    assert got["mu"] == [f"mu{i}" for i in range(4)] and got["acts"] == ["nu0", "nu1"]
    v2 = summary(make_method(tiny("drqv2", method="drqv2", M=2, K=2)))
    assert v2["nu"] == TWO and v2["mu"] == ["mu0", "mu1"] and v2["combine"] == "average"


def test_weights_and_kinds_reach_the_terms() -> None:
    changes = {"kl_weight": 0.7, "kl_units": "exact", "kl_stop": "second", "tangent_weight": 0.6,
               "tangent_twins": "each", "tangent_reduce": "mean", "tangent_form": "printed", "pad": 3}  # fmt: skip
    method = make_method(tiny(method="ours", **changes))
    kl, tangent = method.actor[1], method.critic[1]
    assert isinstance(kl, PolicyKL) and (kl.weight, kl.units, kl.stop) == (0.7, "exact", "second")
    assert isinstance(tangent, TangentProp) and (tangent.weight, tangent.twins, tangent.reduce) == (0.6, "each", "mean")
    shift = method.critic_samples()[0].view.transform
    assert isinstance(shift, Shift) and (shift.pad, shift.tangent_form) == (3, "printed")
    assert critic_weights(make_method(tiny(method="drq", bellman_reduce="sum"))) == {"nu0": 1, "nu1": 1}
    assert critic_weights(make_method(tiny(method="drac", explicit_weight=1.0))) == {"original0": 0.5, "nu0": 0.5}
    strong = critic_weights(make_method(tiny("dmgb", method="ours", strong_weight=0.2)))
    assert strong == {"nu0": 0.4, "nu1": 0.4, "strong0": 0.2}


def test_terms_of_weight_zero_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    method = make_method(tiny(method="ours", kl_weight=0.0, tangent_weight=0.0))
    assert [type(t) for t in (*method.critic, *method.actor)] == [Bellman, Improve]
    monkeypatch.setattr(methods, "overlay_bank", None)  # not even asked for its images
    assert critic_weights(make_method(tiny("dmgb", method="svea", strong_weight=0.0))) == {"nu0": 1}
    assert critic_weights(make_method(tiny("dmgb", method="svea", strong="conv", strong_weight=1.0))) == {"strong0": 1}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("identity", Identity), ("shift", Shift), ("overlay", Overlay), ("conv", Conv), ("rotate", Rotate), ("blur", Blur),
     ("cutout", Cutout), ("flip", Flip), ("shift+rotate", Compose)],
)  # fmt: skip
def test_transformations_by_name(name: str, kind: type) -> None:
    family = make_transform(name, tiny())
    assert type(family) is kind
    x = pictures(1)
    assert family(x, family.sample(4, Generator().manual_seed(0))).shape == x.shape
    if isinstance(family, Compose):
        assert [f.name for f in family.families] == ["shift", "rotate"]


@pytest.mark.parametrize("strong", ["conv", "rotate", "blur", "cutout", "cutout_color", "jitter", "shift+conv"])
def test_any_strong_transformation_trains(strong: str) -> None:
    config = tiny("dmgb", method="svea", strong=strong)
    _, metrics = update(config, make_method(config))
    assert metrics["critic_loss"].isfinite() and metrics["bellman_strong"] != metrics["bellman_nu"]


def test_the_overlay_folder_reaches_the_bank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Path | None] = []
    monkeypatch.setattr(methods, "overlay_bank", lambda folder: seen.append(folder) or generated_bank(2, 40))
    make_method(tiny("dmgb", method="svea", overlay=tmp_path))
    assert seen == [tmp_path]


# ------------------------------------------------------------------------------------------------ one's own


def test_a_new_method_in_a_few_lines() -> None:
    """Mixed transformations, a strong view, explicit and implicit invariance, an averaged policy as the KL's target."""
    weak = Mixture((Identity(), 0.2), (Shift(4), 0.8))
    nu, eta = View("nu", weak, 2), View("eta", weak, 3)
    strong = View("strong", Rotate(15), on=nu[1])
    method = Method(
        "mine",
        Target((original, View("mu", weak))),
        (Bellman(nu, 0.5), Bellman(strong, 0.5), QInvariance(nu[0], 0.1), TangentProp(strong, 0.01)),
        (Improve(nu), PolicyKL(eta, strong, 0.1, units="exact", average=True)),
    )
    _, metrics = update(tiny(), method)
    assert all(v.isfinite() for v in metrics.values())
    parts = ("bellman_nu", "bellman_strong", "q_invariance_nu1", "tangent_strong", "kl_eta_strong")
    assert "improve_nu" in metrics and all(metrics[name] > 0 for name in parts)


def test_tangent_prop_at_the_identity_is_that_of_the_original() -> None:
    still = View("still", AtIdentity(Shift()))
    method = Method("m", Target(original), (Bellman(original), TangentProp(still)), (Improve(original),))
    draw, x = Draw.sample(method, 4, 2, Generator().manual_seed(0)), pictures(1)
    assert torch.equal(draw.image(x, still[0]), x)


def test_two_terms_of_one_name_are_never_confused() -> None:
    nu = View("nu", Shift(), 2)
    ways = (PolicyKL(nu[0], nu[1], 1.0, "first"), PolicyKL(nu[0], nu[1], 3.0, "second", units="exact"))
    policies = {k: TanhNormal(torch.full((1, 2), m), torch.ones(1, 2)) for k, m in (("nu0", 0.0), ("nu1", 1.0))}
    values = [way(ActorPass(policies, {}, {}, torch.tensor(0.1))).mean() for way in ways]
    assert values[0] != values[1]
    loss, metrics = weigh(ways, ActorPass(policies, {}, {}, torch.tensor(0.1)))
    assert metrics == {"kl_nu1_nu2": values[0], "kl_nu1_nu2_2": values[1]}
    assert loss.item() == pytest.approx((values[0] + 3 * values[1]).item())


# ------------------------------------------------------------------------------------------------ what a user can mend


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "drqkl"}, r"unknown method 'drqkl'\. Did you mean: .*drq_kl"),
        ({"method": "???"}, r"unknown method '\?\?\?'\. Known: .*svea"),
        ({"method": "svea", "strong": "overlap"}, r"unknown transformation 'overlap'\. Did you mean: .*overlay"),
        ({"method": "drq", "weak": "shift+rotat"}, r"unknown transformation 'rotat'\. Did you mean: .*rotate"),
        ({"method": "ours", "M": 1}, r"ours needs more views than M = 1"),
        ({"method": "drq_kl", "M": 1}, r"drq_kl needs more views than M = 1"),
        ({"method": "rad", "J": 2}, r"J = 2: view nu has 1 sample"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_method(tiny(**changes))


def test_the_printed_method_names_its_weights() -> None:
    text = str(make_method(tiny("dmgb", method="ours", kl_weight=0.125, tangent_weight=0.375, strong_weight=0.25)))
    for part in ("0.125 KL_author", "0.375 sum_nu1", "0.75 mean_nu[2]", "0.25 mean_strong[1]", "1/2 sum_k y(f_muk"):
        assert part in text, text
    assert "paired" in str(make_method(tiny(method="rad_plus")))
    for name in METHODS:
        method = make_method(tiny(method=name))
        assert all(f"{t.weight:g} {t}" in str(method) for t in (*method.critic, *method.actor))


def test_the_order_of_terms_does_not_matter() -> None:
    nu = View("nu", Shift())
    strong = View("strong", Blur(), on=nu)
    terms, losses = (Bellman(nu), Bellman(strong)), []
    draw = Draw.sample(Method("m", Target(nu), terms, (Improve(nu),)), 4, 2, Generator().manual_seed(0))
    for order in (terms, terms[::-1]):
        agent = Agent(tiny(), Method("m", Target(nu), order, (Improve(nu),)), (9, SIZE, SIZE), 2)
        losses.append(weigh(order, agent.critic_pass(batch(), draw, torch.zeros(1, 4)))[0].item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_one_view_is_enough_without_the_kl() -> None:
    assert summary(make_method(tiny(method="ours", M=1, kl_weight=0.0)))["nu"] == {"nu0": 1}


@pytest.mark.parametrize(
    ("preset", "changes"),
    [("drq", {"method": "rad_plus", "K": 3}), ("dmgb", {"method": "ours_pda", "strong": "conv"}),
     ("dmgb", {"method": "ours", "strong": "conv", "overlay_tangent_weight": 0.1})],
)  # fmt: skip
def test_settings_that_contradict_each_other(preset: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        config = tiny(preset, **changes)
        update(config, make_method(config))


@pytest.mark.parametrize("changes", [{"method": "ours", "weak": "flip"}, {"method": "drq_tp_original", "weak": "conv"}])
def test_transformations_that_a_method_cannot_use(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        make_method(tiny(**changes))


@pytest.mark.parametrize("actor", [(), (PolicyKL(View("nu", Shift(), 2)[0], View("nu", Shift(), 2)[1]),)])
def test_a_method_without_a_policy_term(actor: Any, tmp_path: Path) -> None:
    method = Method("mine", Target(original), (Bellman(original),), actor)
    sentence = "mine needs a critic term such as Bellman and a policy term, Improve"
    with pytest.raises(UserError, match=sentence):
        update(tiny(), method)
    with pytest.raises(UserError, match=sentence):
        train(make_config("toy_reach", preset="cpu", method="mine", runs=tmp_path), method)
    assert list(tmp_path.iterdir()) == []
