"""The paper's experiments as lists of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unmoved.config import Config, make_config
from unmoved.errors import UserError
from unmoved.experiments import (
    EXPERIMENTS,
    ExperimentsArgs,
    Selection,
    gpu_hours,
    read_bench,
    runs_of,
    show,
    total_hours,
    unique,
)
from unmoved.methods import make_method

BENCH: dict[str, Any] = {
    "updates": {"drq/drq": {"ms": 4.0}, "drq/ours": {"ms": 6.0}, "dmgb/svea": {"ms": 3.0}},
    "end_to_end": {"drq/walker_run/drq": {"agent_steps_per_s": 200.0, "env_alone_per_s": 500.0}},
}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_run_is_a_recipe_of_its_own_folder(name: str) -> None:
    configs = runs_of(Selection(name, seeds=(1, 2)))
    assert len({c.folder for c in configs}) == len(configs)
    for c in configs:
        plain = make_config(c.task, preset=c.preset, method=c.method)
        assert c.folder.parts[-4:] == (c.preset, c.task, c.method, str(c.seed))
        changed = (
            c.strong,
            c.kl_stop,
            c.kl_weight,
            c.tangent_weight,
            c.M,
            c.K,
            c.J,
            c.strong_in_target,
            c.updates_per_step,
        )
        same = (plain.strong, plain.kl_stop, plain.kl_weight, plain.tangent_weight, plain.M, plain.K, plain.J,
                plain.strong_in_target, plain.updates_per_step)  # fmt: skip
        assert (c.folder == plain.folder.parent / str(c.seed)) == (changed == same)
    for c in configs[: len(configs) // 2]:
        if c.strong != "overlay" or c.method not in ("svea", "ours"):  # overlay loads its images
            make_method(c)


def test_the_numbers_of_the_paper() -> None:
    ablation = runs_of(Selection("ablation"))
    assert len(ablation) == 9 * 5 * 5
    # finger_spin, reacher_easy and ball_in_cup have 250k frames, the six others 500k
    assert sum(c.frames for c in ablation) == (3 * 250_000 + 6 * 500_000) * 25
    assert [c.method for c in runs_of(Selection("case_study", seeds=(1,)))] == [
        "rad", "rad_plus", "drq", "drq_kl_fixed", "drq_kl", "ours",
    ]  # fmt: skip
    target = runs_of(Selection("target_augmentation", seeds=(1,)))
    assert sorted(c.strong for c in target if c.strong_in_target and c.updates_per_step == 4) == ["conv", "rotate"]
    assert sorted(c.strong for c in target if not c.strong_in_target) == ["blur", "conv", "overlay", "rotate"]
    assert {c.frames for c in runs_of(Selection("complexity"))} == {100_000}
    assert {c.eval_backgrounds for c in runs_of(Selection("generalization"))} == {("train", "video_hard")}
    assert len(runs_of(Selection("weights", seeds=(1,)))) == 9


def test_shared_runs_are_trained_once() -> None:
    both = runs_of(Selection("ablation")) + runs_of(Selection("sample_efficiency"))
    assert len(unique(both)) == 9 * 5 * 7  # rad, drq and ours are in both
    short, long = runs_of(Selection("complexity", seeds=(1,))), runs_of(Selection("target_augmentation", seeds=(1,)))
    assert {c.folder for c in short} < {c.folder for c in long}
    assert {c.frames for c in unique(short + long)} == {500_000}
    a, b = (next(c for c in runs_of(Selection(name)) if (c.task, c.method) == ("walker_run", "ours"))
            for name in ("case_study", "ablation"))  # fmt: skip
    assert a == b


def test_scaled_down() -> None:
    selection = Selection("ablation", ("toy_reach",), ("rad", "ours"), (3,), 400, "cpu", Path("x"))
    configs = runs_of(selection, ["--batch-size", "8", "--video"])
    assert [(c.task, c.method, c.seed, c.frames, c.preset, c.batch_size, c.video) for c in configs] == [
        ("toy_reach", "rad", 3, 400, "cpu", 8, True), ("toy_reach", "ours", 3, 400, "cpu", 8, True),
    ]  # fmt: skip
    assert configs[0].folder == Path("x/cpu/toy_reach/rad/3")
    by_variant = runs_of(Selection("kl_direction", methods=("stop_second",), seeds=(1,)))
    assert {c.kl_stop for c in by_variant} == {"second"}


def test_seeds_come_whole() -> None:
    configs = runs_of(Selection("ddpg", seeds=(4, 2)))
    assert [c.seed for c in configs] == [4] * 20 + [2] * 20


@pytest.mark.parametrize(
    ("selection", "options", "hint"),
    [
        (Selection("ablatoin"), [], "ablation"),
        (Selection("ablation", methods=("orus",)), [], "ours"),
        (Selection("ablation", tasks=("walker_rnu",)), [], "walker_run"),
        (Selection("ablation", seeds=(1, 1)), [], "each once"),
        (Selection("ablation", seeds=()), [], "at least one"),
        (Selection("ablation"), ["--seed", "7"], "before the --"),
    ],
)
def test_bad_selections(selection: Selection, options: list[str], hint: str) -> None:
    with pytest.raises(UserError, match=hint):
        runs_of(selection, options)


def config(**changes: Any) -> Config:
    return make_config("walker_run", preset="drq", frames=20_000, **changes)


def test_hours_by_hand() -> None:
    # 10,000 agent steps of 4 ms and 1 ms beside (200 steps/s are 5 ms); 3 evaluations, 10 episodes, 500 steps at 500/s
    assert gpu_hours(config(method="drq"), BENCH) == pytest.approx((10_000 * 5e-3 + 3 * 10 * 500 / 500) / 3600)
    assert gpu_hours(config(method="ours"), BENCH) == pytest.approx((10_000 * 7e-3 + 30) / 3600)
    assert gpu_hours(config(method="rad"), BENCH) == gpu_hours(
        config(method="ours"), BENCH
    )  # not measured: the dearest
    assert gpu_hours(config(method="drq", update_every=2), BENCH) == pytest.approx((10_000 * 3e-3 + 30) / 3600)
    assert gpu_hours(make_config("walker_run", preset="drqv2"), BENCH) is None
    assert total_hours([config(method="drq")] * 2, BENCH) == pytest.approx(2 * 80 / 3600)
    assert total_hours([config()], None) is None


def test_bench_files(tmp_path: Path) -> None:
    assert read_bench(tmp_path / "none.json") is None
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(BENCH))
    assert read_bench(path) == BENCH
    for text in ("{", "[]", '{"updates": {}, "end_to_end": {}}'):
        path.write_text(text)
        with pytest.raises(UserError, match="bench"):
            read_bench(path)


def test_listing(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unmoved.log.console.width", 200, raising=False)
    show(ExperimentsArgs(bench=tmp_path / "none.json"), [])
    out = capsys.readouterr().out
    assert all(name in out for name in EXPERIMENTS) and "No estimate" in out and "93.8 M" in out
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(BENCH))
    show(ExperimentsArgs("case_study", frames=20_000, seeds=(1,), bench=path), [])
    out = capsys.readouterr().out
    assert "6 runs, 0.1 M frames" in out and "drq_kl_fixed" in out
    with pytest.raises(UserError, match="name it"):
        show(ExperimentsArgs(methods=("rad",), bench=path), [])
