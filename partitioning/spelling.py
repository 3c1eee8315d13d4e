"""Hints for misspelt names, without jax: some mistakes are found before it is imported."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name, ` Did you mean 'x'?`, or '' if no known name is close."""
    found = difflib.get_close_matches(str(name), [str(k) for k in known], n=1)
    return f' Did you mean {found[0]!r}?' if found else ''
