"""`unmoved verify`: it passes what is true and refuses what is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from unmoved import verify
from unmoved.cli import main
from unmoved.config import make_config
from unmoved.subjects import random_subject
from unmoved.train import train
from unmoved.verify import Check, checks, critic_checks, tightest


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("relation", "left", "right", "holds"),
    [
        ("=", 1.0, 1.0 + 1e-9, True),
        ("=", 1.0, 1.001, False),
        ("->", 1.0, 1.001, True),
        ("->", 1.0, 1.1, False),
        ("<=", 1.0, 2.0, True),
        ("<=", 2.0, 1.0, False),
    ],
)
def test_what_a_check_means(relation: str, left: float, right: float, holds: bool) -> None:
    check = Check("x", "1", left, relation, right)
    assert check.holds is holds is check.passed and check.slack == right - left
    assert Check("x", "1", left, relation, right, printed=True).passed is not holds


def test_the_tightest_instance_is_shown() -> None:
    pairs = [(1.0, 5.0), (2.0, 2.5), (0.0, 0.0)]
    check = tightest("x", "1", "<=", ((torch.tensor(a), torch.tensor(b)) for a, b in pairs))
    assert (check.left, check.right) == (2.0, 2.5)


@pytest.mark.parametrize("transform", ["shift", "rotate", "conv", "flip"])
def test_everything_holds_on_random_networks(transform: str) -> None:
    every = checks(transform=transform, states=2, seed=1)
    assert [c.name for c in every if not c.passed] == []
    assert sum(c.printed for c in every) >= 5 and len(every) >= 20
    for c in every:
        if c.relation != "=" and not c.printed:
            assert c.right != 0, f"{c.name} says nothing"


def test_random_tables_hold_for_many_seeds(float64: None) -> None:
    for seed in range(20):
        assert [c.name for c in verify.random_checks(seed) if not c.passed] == []


def test_a_wrong_network_pass_is_noticed(float64: None) -> None:
    """The dual batch with a wrong tangent fails its check."""
    subject = random_subject("shift", 2, seed=0)
    names = {c.name for c in critic_checks(subject) if not c.passed}
    assert not names
    tangent = subject.family.tangent
    subject.family.tangent = lambda *a: tangent(*a).roll(1, -1)  # type: ignore[method-assign]
    assert all(c.passed for c in critic_checks(subject)), "both sides see the same tangent"
    critic = subject.agent.nets.critic.forward
    subject.agent.nets.critic.forward = lambda f, a, t=0: critic(f, a, t) * (1.1 if t else 1.0)  # type: ignore
    assert {c.name for c in critic_checks(subject) if not c.passed} == {"dQ/dtau by dual batch = central difference"}


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(
        "toy_reach", preset="cpu", method="svea", frames=80, action_repeat=2, image_size=24, batch_size=4, filters=4,
        feature_dim=8, hidden_dim=16, capacity=100, random_steps=10, eval_every=200, eval_episodes=1, device="cpu",
        strong="blur", runs=tmp_path,
    )  # fmt: skip
    run = train(config)
    main(["verify", "--run", str(run), "--states", "2"])
    text = capsys.readouterr().out
    assert "Lemma 1" in text and "as they should be" in text and torch.get_default_dtype() == torch.float32
    monkeypatch.setattr(verify, "checks", lambda *a: [Check("wrong", "0", 1.0, "=", 2.0)])
    with pytest.raises(SystemExit) as stop:
        main(["verify"])
    assert stop.value.code == 1 and "FAIL" in capsys.readouterr().out
