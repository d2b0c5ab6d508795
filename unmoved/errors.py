"""What a user can mend: one sentence, no traceback, exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NoReturn


class UserError(Exception):
    """Bad input. The command line prints the message alone and exits with 2."""


class Diverged(RuntimeError):
    """A loss or a parameter is no longer finite. The command line exits with 3."""


def unknown(kind: str, name: str, known: Iterable[str]) -> NoReturn:
    """Refuse a name, with its nearest neighbours among the known ones."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        raise UserError(f"unknown {kind} '{name}'. Did you mean: {', '.join(near)}?")
    listed = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
    raise UserError(f"unknown {kind} '{name}'. Known: {listed}.")
