"""`unmoved advise`: the verdict, and the whole command on a transformation and an environment of a user's own."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator

from unmoved import Agent, advise, make_config, make_method
from unmoved.advise import PAPER, Advice, Similarity, compare, similarity
from unmoved.cli import main
from unmoved.errors import UserError
from unmoved.log import read_rows
from unmoved.methods import make_transform
from unmoved.transforms import FromModule, Identity, Shift

TINY: dict[str, Any] = {"image_size": 24, "strides": (2, 1), "filters": 3, "feature_dim": 6, "hidden_dim": 8}


def advice(actor: float, critic: float, error: float = 0.001, margin: float = 0.02) -> Advice:
    heads = {h: Similarity(0.9, 0.9 + d, d, error) for h, d in (("actor", actor), ("critic", critic))}
    return Advice("x", heads, margin, 100_000)


@pytest.mark.parametrize(
    ("actor", "critic", "error", "verdict"),
    [
        (0.05, 0.0, 0.001, "simple"),
        (-0.01, -0.01, 0.001, "simple"),  # similar
        (-0.03, 0.0, 0.001, "complex"),
        (0.0, -0.05, 0.001, "complex"),
        (-0.03, 0.0, 0.02, "unclear"),  # lower, but not by two standard errors
        (-0.01, 0.0, 0.02, "unclear"),
    ],
)
def test_verdict(actor: float, critic: float, error: float, verdict: str) -> None:
    assert advice(actor, critic, error).verdict == verdict
    assert ("safe" in advice(actor, critic, error).advice) == (verdict == "simple")


def test_the_paper_s_table_gets_the_paper_s_verdicts() -> None:
    """Table F: blur and overlay are simple, conv and rotation complex."""
    for name, pairs in PAPER.items():
        differences = [candidate - weak for weak, candidate in pairs]
        assert advice(*differences, error=0.005).verdict == ("complex" if name in ("conv", "rotate") else "simple")


def test_similarity_by_hand() -> None:
    """Paired over states: differences -.1, -.3; over two seeds: the means' differences -.2 and -.4."""
    one = (torch.tensor([0.9, 0.8]), torch.tensor([0.8, 0.5]))
    s = similarity([one])
    assert (s.weak, s.candidate, s.difference) == pytest.approx((0.85, 0.65, -0.2))
    assert s.error == pytest.approx(math.sqrt(0.02) / math.sqrt(2))
    two = (torch.tensor([0.9, 0.9]), torch.tensor([0.5, 0.5]))
    s = similarity([one, two])
    assert s.difference == pytest.approx(-0.3) and s.error == pytest.approx(math.sqrt(0.02) / math.sqrt(2))


def test_compare_by_brute_force() -> None:
    config = make_config(**TINY, method="svea", strong="blur", pad=1)
    agent = Agent(config, make_method(config), (9, 24, 24), 2)
    obs = torch.randint(256, (3, 9, 24, 24), dtype=torch.uint8)
    got = compare(agent, obs, Shift(1), Identity(), Generator().manual_seed(0))
    shift = Shift(1)
    with torch.no_grad():
        for head, module in (("actor", agent.nets.actor.head), ("critic", agent.nets.critic.head)):
            rows = torch.stack([module(agent.nets.encoder(shift(obs, t.expand(3, 2)))) for t in shift.support()])
            pairs = [torch.cosine_similarity(a, b, dim=-1) for a in rows for b in rows]
            torch.testing.assert_close(got[head][0], torch.stack(pairs).mean(0), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(got[head][1], torch.ones(3))


TRANSFORMATIONS = """
import torch
from unmoved import Transformation

class Invert(Transformation):
    def sample(self, n, generator):
        return torch.randint(2, (n,), generator=generator, device=generator.device)
    def __call__(self, x, tau):
        x = x if x.is_floating_point() else x.float()
        return torch.where(tau[:, None, None, None] > 0, 255 - x, x)

def number(): return 3
def module(): return torch.nn.Identity()
"""
ENVIRONMENT = """
import gymnasium, numpy as np
from gymnasium import spaces

class Dots(gymnasium.Env):
    observation_space, action_space = spaces.Box(0, 255, (24, 24, 3), np.uint8), spaces.Box(-1, 1, (1,))
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}
    def observe(self):
        return self.np_random.integers(0, 256, (24, 24, 3), dtype=np.uint8)
    def step(self, action):
        self.t += 1
        return self.observe(), float(action[0]), False, self.t >= 30, {}
"""


@pytest.fixture
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    name = f"advise_{os.getpid()}_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(TRANSFORMATIONS)
    (tmp_path / f"{name}_env.py").write_text(ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / name


def test_transformations_of_a_users_module(users_module: Path) -> None:
    config, name = make_config(**TINY), users_module.name
    assert make_transform(f"{name}:Invert", config).name == "invert"
    assert isinstance(make_transform(f"{name}:module", config), FromModule)
    with pytest.raises(UserError, match="made a int, not a Transformation"):
        make_transform(f"{name}:number", config)
    with pytest.raises(UserError, match="no function 'Missing'"):
        make_transform(f"{name}:Missing", config)


def test_the_whole_command(users_module: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Trains on a user's environment with a user's transformation, then measures; a second call trains nothing; --quick
    measures on the run."""
    short = advise.short
    tiny = TINY | {"random_steps": 10, "batch_size": 4, "pad": 1, "eval_workers": 1}
    monkeypatch.setattr(advise, "short", lambda c: short(advise.replace(c, **tiny)))
    task, own = f"{users_module.name}_env:Dots", f"{users_module.name}:Invert"
    words = ["advise", task, "--preset", "cpu", "--frames", "120", "--transforms", own, "--batch", "16",
             "--device", "cpu"]  # fmt: skip
    main(words)
    text = capsys.readouterr().out
    assert "Invert" in text and "verdict" in text and "another quantity" not in text
    rows = read_rows(Path("runs/advise/advice.jsonl"))
    assert [row["transform"] for row in rows] == [own] and rows[0]["frames"] == 120
    assert all(-1 <= row["critic_candidate"] <= 1.0001 and row["actor_error"] > 0 for row in rows)
    assert len(list(Path("runs/advise").glob("*.png"))) == 1
    main(words)
    again = read_rows(Path("runs/advise/advice.jsonl"))[1:]
    assert again == rows and "is complete" in capsys.readouterr().out
    run = next(Path("runs/advise").glob("*/cpu/*/svea/1"))
    main(["advise", task, "--quick", "--run", str(run), "--transforms", "flip", "--batch", "16", "--device", "cpu"])
    assert "another quantity" in capsys.readouterr().out
    assert read_rows(run / "advice.jsonl")[0]["quick"] is True


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--quick"], "give both"),
        (["--run", "nowhere"], "give both"),
        (["--quick", "--run", "nowhere"], "config.json"),
        (["--transforms", "blurr"], "blur"),
        (["--transforms", ","], "at least one"),
    ],
)
def test_mistakes(words: list[str], sentence: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["advise", "toy_reach", *words])
    assert stop.value.code == 2 and sentence in capsys.readouterr().err and not list(tmp_path.iterdir())
