"""The frame ring against a list of episodes that is searched by brute force."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from unmoved.replay import Replay

GAMMA, STACK = 0.9, 3


@dataclass
class Episode:
    frames: list[int]  # each frame is filled with its own number
    rewards: list[float] = field(default_factory=list)
    terminated: bool = False


def picture(number: int) -> np.ndarray:
    return np.full((3, 2, 2), number % 251, np.uint8)


def fill(replay: Replay, rng: np.random.Generator, steps: int) -> list[Episode]:
    """Random episodes of 1 to 12 steps, some terminated, the last one still going on."""
    episodes, number = [], 0
    while steps > 0:
        episode = Episode([number])
        episodes.append(episode)
        replay.start(picture(number))
        number += 1
        for i in range(length := int(rng.integers(1, 13))):
            last = i == length - 1
            episode.rewards.append(float(rng.normal()))
            episode.terminated = bool(last and rng.random() < 0.5)
            action = np.full(2, number / 1000, np.float32)
            replay.add(action, episode.rewards[-1], episode.terminated, picture(number))
            episode.frames.append(number)
            number += 1
            steps -= 1
            if steps == 0:
                break
    return episodes


def transitions(episodes: list[Episode], n: int) -> dict[int, tuple[list[int], float, float, list[int]]]:
    """start frame -> (stack of s, n-step reward, discount, stack of the state it bootstraps from), by definition."""

    def stack(frames: list[int], i: int) -> list[int]:
        return [frames[max(i - k, 0)] for k in (2, 1, 0)]

    out = {}
    for e in episodes:
        steps = len(e.rewards)
        for i in range(steps):
            if i + n <= steps or e.terminated:
                end = min(i + n, steps)
                reward = sum(GAMMA**k * r for k, r in enumerate(e.rewards[i:end]))
                discount = 0.0 if e.terminated and end == steps else GAMMA ** (end - i)
                out[e.frames[i]] = (stack(e.frames, i), reward, discount, stack(e.frames, end))
    return out


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("steps", [5, 60, 400])
def test_every_transition_is_what_the_episodes_say(n: int, steps: int) -> None:
    replay = Replay(64, (9, 2, 2), 2, stack=STACK, n_step=n, discount=GAMMA, episode_steps=6)
    expected = transitions(fill(replay, np.random.default_rng(steps), steps), n)
    valid = replay.starts[(torch.arange(len(replay)) + replay.tail) % replay.capacity]
    # The slot counts frames, so a start is the frame's number: the newest transitions are there, in order, no other.
    assert valid.tolist() == sorted(expected)[-len(replay) :]
    assert len(replay) >= min(len(expected), replay.capacity - 20)
    batch = replay.gather(valid)
    for i, start in enumerate(valid.tolist()):
        s, reward, discount, next_s = expected[start]
        assert batch.obs[i, ::3, 0, 0].tolist() == [f % 251 for f in s]
        assert batch.next_obs[i, ::3, 0, 0].tolist() == [f % 251 for f in next_s]
        assert batch.reward[i].item() == pytest.approx(reward, abs=1e-5)
        assert batch.discount[i].item() == pytest.approx(discount, abs=1e-6)
        assert batch.action[i, 0].item() == pytest.approx((start + 1) / 1000)


def test_a_time_limit_bootstraps_and_a_termination_does_not() -> None:
    for terminated, discount in ((False, GAMMA), (True, 0.0)):
        replay = Replay(8, (9, 2, 2), 1, discount=GAMMA)
        replay.start(picture(0))
        replay.add(np.zeros(1, np.float32), 1.0, terminated, picture(1))
        replay.start(picture(2))  # the next episode
        assert replay.sample(4, torch.Generator().manual_seed(0)).discount.tolist() == pytest.approx([discount] * 4)


def test_sampling_is_uniform_and_seeded() -> None:
    replay = Replay(10, (9, 2, 2), 2, episode_steps=10)
    fill(replay, np.random.default_rng(0), 300)
    draws = [replay.sample(2000, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(draws[0].index, draws[1].index)
    counts = torch.unique(draws[0].index, return_counts=True)[1]
    assert len(counts) == len(replay)
    expected = 2000 / len(replay)
    assert ((counts - expected) ** 2 / expected).sum() < 30  # chi-square with 9 degrees: 30 is p < 0.001


def test_a_hundred_thousand_transitions_fit_in_2_3_gigabytes() -> None:
    small = Replay(1_000, (9, 84, 84), 6, episode_steps=500)
    assert small.nbytes * 100 <= 2.3e9


def test_a_restored_replay_goes_on_as_the_original() -> None:
    def make() -> Replay:
        return Replay(32, (9, 2, 2), 2, n_step=3, episode_steps=6, state_size=2)

    for steps in (10, 200):
        a, b = make(), make()
        fill(a, np.random.default_rng(1), steps)
        b.load_state(a.state())
        for replay in (a, b):
            fill(replay, np.random.default_rng(2), 7)
        x, y = (r.sample(50, torch.Generator().manual_seed(0)) for r in (a, b))
        assert torch.equal(x.obs, y.obs) and torch.equal(x.reward, y.reward) and torch.equal(x.next_obs, y.next_obs)


def test_a_checkpoint_holds_only_what_was_written() -> None:
    replay = Replay(1_000, (9, 84, 84), 1)
    replay.start(np.zeros((3, 84, 84), np.uint8))
    frames = replay.state()["frames"]
    assert frames.shape[0] == 1 and frames.untyped_storage().nbytes() == frames.nbytes


def test_simulator_states_lie_beside_their_frames() -> None:
    replay = Replay(8, (9, 2, 2), 1, state_size=2)
    replay.start(picture(0), np.array([0.0, 1.0]))
    replay.add(np.zeros(1, np.float32), 0.0, False, picture(1), np.array([2.0, 3.0]))
    assert replay.states[:2].tolist() == [[0, 1], [2, 3]]
