"""The compiled passes mean what the eager ones mean. (The GPU's own code generator is not part of this.)"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from unmoved.agent import Agent
from unmoved.compile import Acting, Updater, compile_passes
from unmoved.config import make_config
from unmoved.log import Meter
from unmoved.methods import make_method
from unmoved.replay import Replay

SHAPE = (9, 32, 32)


def updater(preset: str, backend: str | None, **changes: Any) -> Updater:
    small = {"filters": 4, "hidden_dim": 16, "feature_dim": 8, "image_size": 32, "batch_size": 4, "capacity": 50}
    config = make_config("walker_walk", preset=preset, **(small | {"strides": (2, 1, 1)} | changes))
    agent = Agent(config, make_method(config), SHAPE, 2)
    if backend:
        compile_passes(agent, backend)
    replay, rng = Replay(50, SHAPE, 2, n_step=config.n_step), np.random.default_rng(0)
    replay.start(rng.integers(0, 255, (3, 32, 32), dtype=np.uint8))
    for _ in range(20):
        frame = rng.integers(0, 255, (3, 32, 32), dtype=np.uint8)
        replay.add(rng.uniform(-1, 1, 2).astype(np.float32), float(rng.random()), False, frame)
    return Updater(agent, replay, torch.Generator().manual_seed(0), Meter(config.batch_size))


@pytest.mark.parametrize(
    ("preset", "changes"),
    [("drq", {"method": "ours"}), ("drqv2", {"method": "ours"}), ("dmgb", {"method": "ours"}),
     ("dmgb", {"method": "svea", "strong": "conv"})],
)  # fmt: skip
def test_compiled_passes_are_the_eager_ones(preset: str, changes: dict[str, Any]) -> None:
    eager, compiled = (updater(preset, backend, **changes) for backend in (None, "aot_eager"))
    for run in (eager, compiled):
        for actor in (True, False, True):
            run(0.5, actor=actor, target=actor)
    for (name, a), (_, b) in zip(eager.meter.read().items(), compiled.meter.read().items(), strict=True):
        assert a == pytest.approx(b, rel=1e-4), name
    for (name, p), q in zip(eager.agent.nets.named_parameters(), compiled.agent.nets.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-3, atol=1e-5), name


def test_acting_is_the_agent_s_policy() -> None:
    run = updater("drq", None, method="drq")
    acting = Acting(run.agent, SHAPE)
    obs = np.random.default_rng(0).integers(0, 255, SHAPE, dtype=np.uint8)
    state = run.agent.acting.get_state()
    action = acting(obs, 0.0)
    run.agent.acting.set_state(state)
    assert (action == run.agent.act(torch.from_numpy(obs[None]), explore=True)[0].numpy()).all()
