from __future__ import annotations

from pathlib import Path

import pytest
import torch

from unmoved import checkpoint
from unmoved.errors import UserError


def save(run: Path, steps: int) -> Path:
    return checkpoint.save(run, steps, {"agent": {"x": torch.full((1000,), float(steps))}, "replay": {"n": steps}})


def test_the_newest_and_the_previous_are_kept(tmp_path: Path) -> None:
    for steps in (1, 2, 3):
        save(tmp_path, steps)
    assert [int(p.name) for p in checkpoint.listed(tmp_path)] == [3, 2]
    parts = checkpoint.load(tmp_path, ("agent", "replay"), print)
    assert parts is not None and parts["replay"] == {"n": 3} and parts["agent"]["x"][0] == 3


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_a_damaged_one_is_named_and_passed_over(tmp_path: Path, damage) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    damage(newest / "agent.pt")
    said: list[str] = []
    parts = checkpoint.load(tmp_path, ("agent",), said.append)
    assert parts is not None and parts["agent"]["x"][0] == 1
    assert len(said) == 1 and newest.name in said[0] and "damaged" in said[0]
    truncate(checkpoint.listed(tmp_path)[1] / "agent.pt")
    with pytest.raises(UserError, match="whole"):
        checkpoint.load(tmp_path, ("agent",), said.append)


def test_a_damaged_one_does_not_outlive_whole_ones(tmp_path: Path) -> None:
    for steps in (1, 3):
        save(tmp_path, steps)
    truncate(checkpoint.listed(tmp_path)[0] / "agent.pt")
    checkpoint.set_aside(tmp_path, 1)
    save(tmp_path, 2)
    assert [int(p.name) for p in checkpoint.listed(tmp_path)] == [2, 1]


def test_a_draft_is_no_checkpoint(tmp_path: Path) -> None:
    """A kill while writing leaves a draft, which is never read and goes with the next one of its step."""
    save(tmp_path, 1)
    draft = tmp_path / "checkpoint" / "draft-2"
    draft.mkdir()
    (draft / "agent.pt").write_bytes(b"half")
    assert [p.name for p in checkpoint.listed(tmp_path)] == ["0000000001"]
    save(tmp_path, 2)
    assert not draft.exists()
