"""How an update and an action are run: the same code, eagerly, or compiled, captured once and replayed on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from unmoved.agent import Agent, Batch
from unmoved.log import Meter, console
from unmoved.losses import Draw
from unmoved.replay import Replay

WARM_UP = 3  # updates that run eagerly before a capture: they make the optimisers' state and choose the kernels


def compile_passes(agent: Agent, backend: str = "inductor") -> None:
    """Compile what an update is made of. The optimisers' steps too: torch's own fused Adam leaves half of a large GPU
    idle."""
    # Padded rows would have to be copied before our kernels can read them.
    compiled = partial(
        torch.compile,
        dynamic=False,
        backend=backend,
        options={"comprehensive_padding": False} if backend == "inductor" else None,
    )
    for name in ("target_pass", "critic_loss", "actor_features", "actor_loss", "follow"):
        setattr(agent, name, compiled(getattr(agent, name)))
    for optimizer in agent.optimizers.values():
        optimizer.step = compiled(optimizer.step)  # type: ignore[method-assign]


class Updater:
    """Sample, draw, update, count. On a GPU sampling and each kind of update (with or without actor, target) are CUDA
    graphs: an update costs the host two launches.

    A graph replays the same kernels on the same memory: every input it reads (replay, parameters, generators, std) is
    changed in place. Inside it the four passes are compiled, which fuses the transformation, the scaling and everything
    between two convolutions.
    """

    def __init__(self, agent: Agent, replay: Replay, sampling: Generator, meter: Meter) -> None:
        self.agent, self.replay, self.sampling, self.meter = agent, replay, sampling, meter
        self.std = torch.zeros((), device=agent.device)
        self.batch: Batch | None = None
        self.use_graphs = agent.config.compile and agent.device.type == "cuda"
        if self.use_graphs and not agent.method.capturable():
            console.print("a transformation of this method draws on the host: updates run eagerly, and slower")
            self.use_graphs = False
        self.sample: Callable[[], None] = self._graphed(self._sample) if self.use_graphs else self._sample
        self.kinds: dict[tuple[bool, bool], Callable[[], None]] = {
            (actor, target): partial(self._update, actor, target) for actor in (False, True) for target in (False, True)
        }
        if self.use_graphs:
            compile_passes(agent)
            replay.look_up = torch.compile(replay.look_up, dynamic=False)  # type: ignore[method-assign]
            self.kinds = {kind: self._graphed(update) for kind, update in self.kinds.items()}

    @property
    def warming_up(self) -> bool:
        """Whether the first updates are under way: compiling, or being captured."""
        return isinstance(self.sample, Graphed) and self.sample.runs > 0 and not self.settled

    @property
    def settled(self) -> bool:
        """Whether updates are graphs, and no graph is still to be captured."""
        graphs = [g for g in (self.sample, *self.kinds.values()) if isinstance(g, Graphed)]
        return any(g.graph is not None for g in graphs) and all(g.settled for g in graphs)

    def __call__(self, std: float, *, actor: bool, target: bool) -> None:
        self.std.fill_(std)
        with self.replay.turns.sampling():
            self.sample()
        self.kinds[actor, target]()

    def _graphed(self, function: Callable[[], None]) -> Graphed:
        return Graphed(function, (self.sampling, self.agent.generator))

    def _sample(self) -> None:
        # Once captured, sampling fills the same memory every time, and that is what the update's graph reads.
        self.batch = self.replay.sample(self.agent.config.batch_size, self.sampling)

    def _update(self, actor: bool, target: bool) -> None:
        agent, batch = self.agent, self.batch
        assert batch is not None and batch.index is not None
        draw = Draw.sample(agent.method, len(batch.reward), agent.action_dim, agent.generator)
        metrics = agent.update(batch, draw, self.std, actor=actor, target=target)
        self.meter.add(metrics, batch.index)


class Graphed:
    """A function without arguments, run eagerly a few times, then captured and replayed."""

    def __init__(self, function: Callable[[], None], generators: tuple[Generator, ...]) -> None:
        self.function, self.generators, self.runs = function, generators, 0
        self.stream = torch.cuda.Stream()
        self.graph: torch.cuda.CUDAGraph | None = None

    @property
    def settled(self) -> bool:
        return self.graph is not None or self.runs == 0

    def __call__(self) -> None:
        if self.graph is None and self.runs < WARM_UP:
            self.runs += 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.function()
            torch.cuda.current_stream().wait_stream(self.stream)
            return
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            for generator in self.generators:
                self.graph.register_generator_state(generator)
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.function()
        self.graph.replay()


class Acting:
    """One exploring action at a time, with the parameters of `lag` updates ago.

    lag 0: the present ones; acting waits for the update under way. lag 1: a copy taken before that update began, on a
    stream of its own, so that acting, environment and update overlap. On a GPU acting is one CUDA graph too.
    """

    def __init__(self, agent: Agent, obs_shape: tuple[int, ...]) -> None:
        self.agent = agent
        self.fast = agent.config.compile and agent.device.type == "cuda"
        self.lag = agent.config.lag
        nets = agent.nets
        self.own: list[nn.Module] = [nets.encoder, nets.actor]
        self.held: list[nn.Module] = copy.deepcopy(self.own) if self.lag else self.own
        if not self.fast:
            return
        self.obs = torch.zeros(1, *obs_shape, dtype=torch.uint8, device=agent.device)
        self.std = torch.zeros((), device=agent.device)
        self.host_obs = torch.zeros(1, *obs_shape, dtype=torch.uint8, pin_memory=True)
        self.host_action = torch.zeros(1, agent.action_dim, pin_memory=True)
        self.stream = torch.cuda.Stream(agent.device, priority=-1)
        self.fresh = torch.cuda.Event()
        self.action = torch.zeros(1, agent.action_dim, device=agent.device)
        self.graph = Graphed(self._act, (agent.acting,))

    @property
    def settled(self) -> bool:
        return not self.fast or self.graph.graph is not None

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the present parameters; called before each update."""
        if self.lag:
            ours: list[Tensor] = [p for m in self.held for p in m.parameters()]
            theirs: list[Tensor] = [p for m in self.own for p in m.parameters()]
            torch._foreach_copy_(ours, theirs)
            if self.fast:
                self.fresh.record()

    def state(self) -> list[dict[str, Tensor]]:
        return [m.state_dict() for m in self.held] if self.lag else []

    def load_state(self, state: list[dict[str, Tensor]]) -> None:
        for module, values in zip(self.held, state, strict=False):
            module.load_state_dict(values)
        if self.fast:
            self.fresh.record()

    @torch.no_grad()
    def __call__(self, obs: NDArray[np.uint8], std: float) -> NDArray[np.float32]:
        """(C, H, W) -> (|A|,)."""
        if not self.fast:
            scale = torch.tensor(std, device=self.agent.device)
            return self._sample(torch.from_numpy(obs[None]).to(self.agent.device), scale)[0].cpu().numpy()
        self.host_obs[0] = torch.from_numpy(obs)
        if self.lag:
            self.stream.wait_event(self.fresh)
        else:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.obs.copy_(self.host_obs, non_blocking=True)
            self.std.fill_(std)
            self.graph()
            self.host_action.copy_(self.action, non_blocking=True)
        self.stream.synchronize()
        return self.host_action[0].numpy().copy()

    def _act(self) -> None:
        self.action.copy_(self._sample(self.obs, self.std))

    def _sample(self, obs: Tensor, std: Tensor) -> Tensor:
        encoder, actor = self.held
        policy = actor(encoder(obs), std, clip=float("inf"))
        noise = torch.randn(policy.mu.shape, generator=self.agent.acting, device=self.agent.device)
        return policy.sample(noise)[0].clamp(-1, 1)
