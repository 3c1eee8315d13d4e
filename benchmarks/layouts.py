"""Programs whose layouts `meshwright check` compares in this repository; see pyproject.toml.

Each function returns a jitted function and its arguments.
"""

from __future__ import annotations

from typing import Any

from benchmarks.seeded_changes.programs import attention, dense


def gathered_layers() -> Any:
    """A network whose layers are gathered when they are needed."""
    return dense.build()


def attention_by_rules() -> Any:
    """A language model whose layouts come from a table of rules."""
    return attention.build()


def transformer() -> Any:
    """The train step of our own transformer."""
    from benchmarks.blame_programs import our_transformer

    _, step, args = our_transformer.build(our_transformer.RULES)
    return step, args
