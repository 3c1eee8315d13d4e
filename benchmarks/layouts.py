"""Programs whose layouts `meshwright check` compares in this repository; see pyproject.toml.

Each function returns a jitted function and its arguments.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.seeded_changes.programs import attention, dense


def gathered_layers() -> Any:
    """A network whose layers are gathered when they are needed."""
    return dense.build()


def attention_by_rules() -> Any:
    """A language model whose layouts come from a table of rules."""
    return attention.build()


def transformer() -> Any:
    """The train step of our own transformer, with two layers."""
    from benchmarks.blame_programs import our_transformer

    config = dataclasses.replace(
        our_transformer.CONFIG, vocab_size=1024, num_layers=2, embed_dim=256, mlp_dim=512
    )
    _, step, args = our_transformer.build(our_transformer.RULES, config, (16, 128))
    return step, args
