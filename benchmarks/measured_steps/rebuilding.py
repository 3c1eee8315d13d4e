"""From a measured row to the program that stands for it, or to the reason why there is none."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

import jax

from partitioning.hardware import CHIPS
from train.models.parameters import list_parameters
from train.models.transformer import TransformerConfig

from .machines import (
    choose_options,
    choose_rules,
    dcn_axes,
    describe_topology_of,
    ici_axes,
    machine_problems,
)
from .models import describe_model, model_problems
from .program import Program
from .rows import MeasuredRow, load_rows


@dataclasses.dataclass(frozen=True)
class NotRebuilt:
    """Why no program stands for a row.

    Attributes:
      reason: the reason, as one line.
    """

    reason: str


def rebuild(row: MeasuredRow) -> Program | NotRebuilt:
    """Returns the program that stands for a row, or why there is none."""
    for reason in _problems(row):
        return NotRebuilt(reason)
    topology, num_slices = describe_topology_of(row)
    settings = row.settings.get('other_settings') or {}
    program = Program(
        model=describe_model(row),
        output_chunks=settings.get('num_vocab_tiling') or 1,
        topology=topology,
        num_slices=num_slices,
        axes=ici_axes(row),
        dcn=dcn_axes(row),
        rules=choose_rules(row),
        batch_size=row['global_batch'],
        sequence_length=row['seq_len'],
        num_microbatches=row['gradient_accumulation'],
        mu_dtype=(row['dtype']['optimizer'] or {}).get('mu') or 'float32',
        compiler_options=choose_options(row),
    )
    count = count_parameters(program.model) - count_left_out(program.model)
    if count != row.params_total:
        return NotRebuilt(
            f'our model has {count:,} parameters, and the measured one {row.params_total:,}'
        )
    return program


def _problems(row: MeasuredRow) -> Iterator[str]:
    if row.chip not in CHIPS:
        yield f'the chip {row.chip} is not described'
    if not row['usable_for_step_time']:
        yield f'its step time cannot be used: {row["why"]}'
    yield from model_problems(row)
    yield from machine_problems(row)


def count_parameters(model: TransformerConfig) -> int:
    """Counts the parameters of a model."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(list_parameters(model)))


def count_left_out(model: TransformerConfig) -> int:
    """Counts the parameters that the published totals leave out.

    They count the norms before attention and MLP, but not those of queries and keys, nor those of
    the outputs of attention and MLP.
    """
    each = 2 * model.head_dim * model.qk_norm + 2 * model.embed_dim * model.post_norms
    return each * model.num_layers


@dataclasses.dataclass(frozen=True)
class Stand:
    """The program that stands for a row.

    Attributes:
      program: the name of the program.
      num_copies: the number of copies of the model over the slower network, which is larger than
        that of the program if the program has two of them and stands for more.
    """

    program: str
    num_copies: int


def list_programs() -> dict[str, Program]:
    """Returns each distinct program, under the name of the first row that it stands for.

    Rows that later measurements supersede come last, so that programs have the names of others.
    """
    return {name: program for program, name in _names().items()}


def find_stand(row: MeasuredRow) -> Stand | None:
    """Returns the program that stands for a row, or None if there is none."""
    program = rebuild(row)
    if isinstance(program, NotRebuilt):
        return None
    return Stand(_names()[_with_few_copies(row, program)], program.num_copies)


@functools.cache
def _names() -> dict[Program, str]:
    """The name of each distinct program."""
    names: dict[Program, str] = {}
    for row in sorted(load_rows(), key=lambda row: row.superseded):
        program = rebuild(row)
        if isinstance(program, Program):
            names.setdefault(_with_few_copies(row, program), row.name)
    return names


# These are compiled for their own number of slices too, to show what it changes.
_COMPILED_WHOLE = ('v5e-1024-maxtext-16b', 'h100-64-llama2-7b-maxtext')


def _with_few_copies(row: MeasuredRow, program: Program) -> Program:
    """The same program with at most two copies of the model over the slower network."""
    if program.num_copies <= 2 or row.name in _COMPILED_WHOLE:
        return program
    return program.with_slices(2)
