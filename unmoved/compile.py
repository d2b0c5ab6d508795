"""How an update is run: the same `Agent.update`, eagerly, or captured once and replayed as CUDA graphs."""

from __future__ import annotations

import torch
from torch import Generator

from unmoved.agent import Agent
from unmoved.log import Meter
from unmoved.losses import Draw
from unmoved.replay import Replay

WARM_UP = 3  # updates that run eagerly before a capture: they make the optimisers' state and choose the kernels


def compile_passes(agent: Agent) -> None:
    """Compile the functions that touch images. Optimisers are fused already; the terms are small."""
    for name in ("target_pass", "critic_pass", "actor_features", "actor_pass"):
        setattr(agent, name, torch.compile(getattr(agent, name), dynamic=False))


class Updater:
    """Sample, draw, update, count. On a GPU each kind of update (with or without actor, target) becomes one graph.

    A graph replays the same kernels on the same memory: every input it reads (replay, parameters, generators, std) is
    updated in place. Sampling and drawing are inside, so an update costs the host one launch. Inside a graph the four
    passes are compiled, which fuses the transformation, the scaling and everything between two convolutions.
    """

    def __init__(self, agent: Agent, replay: Replay, sampling: Generator, meter: Meter) -> None:
        self.agent, self.replay, self.sampling, self.meter = agent, replay, sampling, meter
        self.use_graphs = graphs = agent.config.compile and agent.device.type == "cuda"
        if graphs:
            compile_passes(agent)
        self.std = torch.zeros((), device=agent.device)
        self.runs: dict[tuple[bool, bool], int] = {}
        self.graphs: dict[tuple[bool, bool], torch.cuda.CUDAGraph] = {}
        self.stream = torch.cuda.Stream(agent.device) if graphs else None

    def __call__(self, std: float, *, actor: bool, target: bool) -> None:
        self.std.fill_(std)
        kind = (actor, target)
        if not self.use_graphs:
            self._update(*kind)
        elif kind in self.graphs:
            self.graphs[kind].replay()
        elif self.runs.get(kind, 0) < WARM_UP:
            self.runs[kind] = self.runs.get(kind, 0) + 1
            assert self.stream is not None
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self._update(*kind)
            torch.cuda.current_stream().wait_stream(self.stream)
        else:
            self._capture(kind)
            self.graphs[kind].replay()

    def _capture(self, kind: tuple[bool, bool]) -> None:
        graph = torch.cuda.CUDAGraph()
        for generator in (self.sampling, self.agent.generator):
            graph.register_generator_state(generator)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=self.stream):
            self._update(*kind)
        self.graphs[kind] = graph

    def _update(self, actor: bool, target: bool) -> None:
        agent = self.agent
        batch = self.replay.sample(agent.config.batch_size, self.sampling)
        draw = Draw.sample(agent.method, agent.config.batch_size, agent.action_dim, agent.generator)
        metrics = agent.update(batch, draw, self.std, actor=actor, target=target)
        assert batch.index is not None
        self.meter.add(metrics, batch.index)
