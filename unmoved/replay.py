"""Replay memory: each frame stored once; stacks and n-step returns are rebuilt on sampling, never across an episode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from unmoved.agent import Batch
from unmoved.errors import UserError


class Turns:
    """Lets a GPU store a step while it updates: writing has a stream of its own, and only the short moment of sampling
    excludes it. A sample so sees the steps stored before it was asked for, no more and no less. Nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.stream is not None:
            self.sampled, self.stored = torch.cuda.Event(), torch.cuda.Event()

    def settle(self) -> None:
        """Wait until all is written."""
        if self.stream is not None:
            torch.cuda.synchronize(self.stream.device)

    @contextmanager
    def writing(self) -> Iterator[None]:
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.sampled)
            yield
            self.stored.record()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        if self.stream is None:
            yield
            return
        torch.cuda.current_stream().wait_event(self.stored)
        yield
        self.sampled.record()


class Replay:
    """A ring of slots. A slot holds a frame and the action, reward and end flag of the step that led to it; the first
    slot of an episode holds its reset frame. Slots are counted without wrapping; slot c lies at row c % slots.

    A transition is known by its start, the slot of s. Starts become valid in order and leave in order, so the valid
    ones are a queue and sampling is one uniform draw, whatever the fill. All that sampling reads is on `device`.
    """

    def __init__(
        self,
        capacity: int,
        obs_shape: tuple[int, ...],
        action_dim: int,
        *,
        stack: int = 3,
        n_step: int = 1,
        discount: float = 0.99,
        episode_steps: int = 500,
        state_size: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.capacity, self.stack, self.n_step, self.discount = capacity, stack, n_step, discount
        # An episode has one more frame than transitions.
        self.slots = capacity + capacity // episode_steps + stack + n_step + 2
        self.device = torch.device(device)
        frame = (obs_shape[0] // stack, *obs_shape[1:])
        rows = {"device": self.device}
        try:
            self.frames = torch.zeros(self.slots, *frame, dtype=torch.uint8, **rows)  # type: ignore[call-overload]
        except RuntimeError:  # torch.cuda.OutOfMemoryError is one
            size = f"{self.slots * int(np.prod(frame)) / 1e9:.1f} GB"
            raise UserError(f"the replay's {size} do not fit on {self.device}: choose a smaller --capacity") from None
        self.action = torch.zeros(self.slots, action_dim, **rows)  # type: ignore[call-overload]
        self.reward = torch.zeros(self.slots, device=self.device)
        self.alive = torch.ones(self.slots, device=self.device)  # 0 where the step terminated the episode
        self.first = torch.zeros(self.slots, dtype=torch.long, device=self.device)  # first slot of the episode
        self.states = np.zeros((self.slots, state_size))  # the simulator's, for diagnostics; stays on the host
        # The queue of valid starts, and where it begins and how long it is, as tensors: sampling never asks the host.
        self.starts = torch.zeros(capacity, dtype=torch.long, device=self.device)
        self.bounds = torch.zeros(2, dtype=torch.long, device=self.device)
        self.turns = Turns(self.device)
        self.written = 0  # slots ever written
        self.head = self.tail = 0  # starts ever queued, ever dropped
        self.episode = 0  # first slot of the present episode
        self.oldest = np.zeros(capacity, dtype=np.int64)  # oldest slot that each queued start needs
        self.turns.settle()

    def __len__(self) -> int:
        return self.head - self.tail

    @property
    def nbytes(self) -> int:
        tensors = (self.frames, self.action, self.reward, self.alive, self.first, self.starts)
        return sum(t.nbytes for t in tensors) + self.states.nbytes

    def start(self, frame: NDArray[np.uint8], state: NDArray[np.float64] | None = None) -> None:
        """A new episode begins with this frame (3, H, W)."""
        self.episode = self.written
        with self.turns.writing():
            self._write(frame, state)
            self._publish()

    def add(
        self,
        action: NDArray[np.float32],
        reward: float,
        terminated: bool,
        frame: NDArray[np.uint8],
        state: NDArray[np.float64] | None = None,
    ) -> None:
        """A step and the frame it led to. A truncation needs no mark: the next episode's start ends this one."""
        with self.turns.writing():
            slot = self._write(frame, state)
            row = slot % self.slots
            self.action[row] = torch.from_numpy(np.asarray(action, dtype=np.float32))
            self.reward[row] = reward
            self.alive[row] = 0.0 if terminated else 1.0
            # The window that ends here is whole; after a termination so are the shorter ones: their future is nothing.
            whole = range(slot - self.n_step, slot if terminated else slot - self.n_step + 1)
            for start in whole:
                if start >= self.episode:
                    self._queue(start)
            self._publish()

    def _write(self, frame: NDArray[np.uint8], state: NDArray[np.float64] | None) -> int:
        slot, row = self.written, self.written % self.slots
        self.written += 1
        while self.tail < self.head and self.oldest[self.tail % self.capacity] <= slot - self.slots:
            self.tail += 1  # its frames are being overwritten
        self.frames[row] = torch.from_numpy(frame)
        self.first[row] = self.episode
        self.alive[row] = 1.0
        if state is not None:
            self.states[row] = state
        return slot

    def _queue(self, start: int) -> None:
        if self.head - self.tail == self.capacity:
            self.tail += 1
        place = self.head % self.capacity
        self.starts[place] = start
        self.oldest[place] = max(start - self.stack + 1, self.episode)
        self.head += 1

    def _publish(self) -> None:
        self.bounds[0] = self.tail % self.capacity
        self.bounds[1] = self.head - self.tail

    def sample(self, n: int, generator: Generator) -> Batch:
        """n transitions, uniformly and with replacement."""
        u = torch.rand(n, generator=generator, device=self.device, dtype=torch.float64)
        place = (u * self.bounds[1]).long() + self.bounds[0]
        return self.gather(self.starts[place % self.capacity])

    def gather(self, start: Tensor) -> Batch:
        """The transitions with these starts (n,)."""
        batch, rows, next_rows = self.look_up(start)
        batch.obs, batch.next_obs = (self.frames[r].flatten(1, 2) for r in (rows, next_rows))
        return batch

    def look_up(self, start: Tensor) -> tuple[Batch, Tensor, Tensor]:
        """All of these transitions but the images, and which frames (n, stack) make those of s and s'."""
        discount = torch.ones(len(start), device=self.device)
        reward = torch.zeros(len(start), device=self.device)
        end = start
        for k in range(1, self.n_step + 1):
            row = (start + k) % self.slots
            going = discount > 0
            reward = reward + discount * self.reward[row]  # discount is gamma^(k-1) while the episode lasts, then 0
            end = torch.where(going, start + k, end)
            discount = discount * self.discount * self.alive[row]
        action = self.action[(start + 1) % self.slots]
        none = torch.empty(0, device=self.device)
        return Batch(none, action, reward, discount, none, index=start), self.stacked(start), self.stacked(end)

    def stacked(self, slot: Tensor) -> Tensor:
        """(n,) -> (n, stack): rows of the frames that end here, oldest first; before the reset, its frame repeats."""
        back = torch.arange(self.stack - 1, -1, -1, device=self.device)
        first = self.first[slot % self.slots]
        return torch.maximum(slot[:, None] - back, first[:, None]) % self.slots

    # What is saved: the written rows of every array, and the counters.
    ARRAYS = ("frames", "action", "reward", "alive", "first")
    COUNTERS = ("written", "head", "tail", "episode")

    def state(self) -> dict[str, Any]:
        rows = min(self.written, self.slots)

        def part(whole: Tensor) -> Tensor:
            """The written rows. A slice of a tensor on the host is copied, or torch.save would store it all."""
            written = whole[:rows]
            return written.clone() if not whole.is_cuda and rows < self.slots else written.cpu()

        self.turns.settle()
        return {
            **{name: part(getattr(self, name)) for name in self.ARRAYS},
            **{name: getattr(self, name) for name in self.COUNTERS},
            "states": torch.from_numpy(self.states[:rows].copy()),
            "starts": self.starts,
            "oldest": torch.from_numpy(self.oldest),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        rows = len(state["frames"])
        for name in self.ARRAYS:
            getattr(self, name)[:rows] = state[name]
        for name in self.COUNTERS:
            setattr(self, name, state[name])
        self.states[:rows] = state["states"].numpy()
        self.starts.copy_(state["starts"])
        self.oldest[:] = state["oldest"].numpy()
        self._publish()
        self.turns.settle()
