"""`unmoved diagnose`: a checkpoint as a table, a row and a picture; several against the paper's orderings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unmoved import checkpoint, diagnose, measure
from unmoved.cli import main
from unmoved.compare import CLAIMS, PAPER, Claim, Mean, compare, judge, means
from unmoved.config import make_config
from unmoved.diagnose import load_run
from unmoved.errors import UserError
from unmoved.log import read_rows
from unmoved.train import Trainer

TINY: dict[str, Any] = {
    "preset": "cpu", "method": "ours", "frames": 240, "action_repeat": 2, "image_size": 24, "batch_size": 4, "pad": 1,
    "filters": 4, "feature_dim": 8, "hidden_dim": 16, "capacity": 90, "random_steps": 20, "eval_every": 1000,
    "eval_episodes": 1, "checkpoint_every": 200, "device": "cpu", "discount": 0.9, "keep_states": True,
    "diagnostics": True, "diagnostics_every": 100, "rare_every": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    trainer = Trainer(make_config("toy_reach", runs=tmp_path_factory.mktemp("runs"), **TINY))
    trainer.run()
    return trainer


def test_what_is_loaded_is_what_was_trained(trainer: Trainer) -> None:
    loaded = load_run(trainer.folder)
    assert loaded.steps == 120
    for key, value in trainer.agent.nets.state_dict().items():
        assert torch.equal(value, loaded.agent.nets.state_dict()[key])
    start = trainer.replay.starts[:20]
    a, b = trainer.replay.gather(start), loaded.replay.gather(start)
    assert torch.equal(a.obs, b.obs) and torch.equal(a.next_obs, b.next_obs) and torch.equal(a.action, b.action)
    assert (trainer.replay.states == loaded.replay.states).all()


def test_command(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    run = trainer.folder
    words = ["--batch", "8", "--transforms", "blur,conv", "--no-tsne"]
    main(["diagnose", str(run), *words, "--rollouts", "2", "--workers", "1"])
    text = capsys.readouterr().out
    assert all(name in text for name in ("target_std", "kl_author", "cosine_critic_conv", "bias_mse", "transformation"))
    (row,) = read_rows(run / "diagnose.jsonl")
    assert row["steps"] == 120 and row["frames"] == 240 and row["bias_restored"] == 1 and "tsne_actor" not in row
    assert (run / "diagnose.png").stat().st_size > 10_000
    main(["diagnose", str(run), *words])  # the same numbers again
    again = read_rows(run / "diagnose.jsonl")[1]
    assert len(again) > 50 and again.items() <= row.items()


def test_an_older_checkpoint(trainer: Trainer) -> None:
    kept = [int(f.name) for f in checkpoint.listed(trainer.folder)]
    assert kept == [120, 100] and load_run(trainer.folder, steps=100).steps == 100
    with pytest.raises(UserError, match="no checkpoint of 7 agent steps; it has those of 120, 100"):
        load_run(trainer.folder, steps=7)


def test_without_scikit_learn(trainer: Trainer, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    for module in (diagnose, measure):
        monkeypatch.setattr(module, "tsne_available", lambda: False)
    row = diagnose.diagnose(trainer.folder, batch=4)
    assert "unmoved[analysis]" in capsys.readouterr().out and "tsne_actor" not in row
    measure.Recorder(trainer.agent, trainer.replay, trainer.folder, True)
    monkeypatch.setattr(trainer.agent, "config", make_config("toy_reach", preset="cpu"))
    measure.Recorder(trainer.agent, trainer.replay, trainer.folder, True)
    assert "unmoved[analysis]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [(["nowhere"], "config.json"), ([], "name a run folder"), (["RUN", "--batch", "1"], "--batch")],
)
def test_mistakes(words: list[str], sentence: str, trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["diagnose", *(str(trainer.folder) if w == "RUN" else w for w in words)])
    assert stop.value.code == 2 and sentence in capsys.readouterr().err


# ------------------------------------------------------------------------------------- several runs


def test_claims_against_the_paper_s_own_table() -> None:
    """With its own means, taken as certain, Table B meets its orderings but these."""
    names = ("critic_loss_std", "target_std", "actor_loss_std_across_batch", "kl_author")
    found = {m: {n: Mean(v, 0.0, 5) for n, v in zip(names, values, strict=True)} for m, values in PAPER.items()}
    verdicts = {claim: judge(claim, found) for claim in CLAIMS}
    assert {v for v in verdicts.values() if v} == {"held"}
    assert [c.statistic for c, v in verdicts.items() if v is None] == ["cosine_actor_shift", "cosine_critic_shift"]


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(1.0, 2.0, "held"), (2.0, 1.0, "not held"), (1.0, 1.1, "within error")]
)
def test_judge(low: float, high: float, verdict: str) -> None:
    found = {"a": {"kl_author": Mean(low, 0.1, 1)}, "b": {"kl_author": Mean(high, 0.1, 1)}}
    assert judge(Claim("", "a", "b", "kl_author"), found) == verdict
    assert judge(Claim("", "a", "c", "kl_author"), found) is None
    assert judge(Claim("", "a", "b", "kl_author", 0.2), found) == "not held"


def test_means_over_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("drq", {"kl_author": v, "kl_author_se": 0.5}) for v in (1.0, 3.0)]
    rows.append(("drq_kl", {"kl_author": 0.2, "kl_author_se": 0.05}))
    found = means(rows)
    assert found["drq"]["kl_author"] == Mean(2.0, 1.0, 2) and found["drq_kl"]["kl_author"] == Mean(0.2, 0.05, 1)
    compare(rows, "toy")
    assert "drq, paper" in capsys.readouterr().out
