"""Trackers beside a run: what they are told, and that a run does not need them."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.test_train import config, rows
from unmoved.errors import UserError
from unmoved.train import train


class Fake(ModuleType):
    """Stands for wandb or trackio."""

    def __init__(self, name: str, breaks: bool = False) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.calls: list[tuple[str, Any]] = []
        self.breaks = breaks

    def init(self, **options: Any) -> None:
        self.calls.append(("init", options))

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        assert self.__name__ == "wandb" and (name, step_metric) in (("frames", None), ("*", "frames"))

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        if self.breaks:
            raise ConnectionError("no network")
        assert step == (None if self.__name__ == "wandb" else values["frames"])
        self.calls.append(("log", (values["frames"], values)))

    def finish(self) -> None:
        self.calls.append(("finish", None))


def test_trackers_get_what_the_rows_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb, trackio = Fake("wandb"), Fake("trackio")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    folder = train(config(tmp_path, frames=100, wandb=True, trackio=True))
    assert wandb.calls[0][1]["id"] == wandb.calls[0][1]["name"] == "cpu-toy_reach-ours-1"
    assert wandb.calls[1:] == trackio.calls[1:] and wandb.calls[-1][0] == "finish"
    logged = [value for name, value in wandb.calls if name == "log"]
    returns = {step: values["eval/return_mean"] for step, values in logged if "eval/return_mean" in values}
    assert returns == {row["frames"]: row["return_mean"] for row in rows(folder, "eval.jsonl")}
    losses = {step: v["train/critic_loss"] for step, v in logged if "train/critic_loss" in v}
    assert losses == {r["frames"]: r["critic_loss"] for r in rows(folder, "train.jsonl") if "critic_loss" in r}


def test_a_tracker_that_fails_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", Fake("trackio", breaks=True))
    folder = train(config(tmp_path, frames=100, trackio=True))
    assert rows(folder, "eval.jsonl")[-1]["frames"] == 100
    assert capsys.readouterr().out.count("trackio failed") == 1


def test_a_missing_package_is_named_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--wandb needs wandb: pip install 'unmoved\[wandb\]'"):
        train(config(tmp_path, wandb=True))
    assert not any(tmp_path.iterdir())
