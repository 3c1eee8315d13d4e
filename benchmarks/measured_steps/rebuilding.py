"""From a measured row to the program that stands for it, or to the reason why there is none."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import jax

from partitioning.hardware import CHIPS, DEFAULT_OPTIONS
from train.models.parameters import list_parameters
from train.models.transformer import TransformerConfig

from .models import describe_model, model_problems
from .program import Axes, Program, Rules
from .rows import MeasuredRow, load_rows


def rebuild(row: MeasuredRow) -> Program | str:
    """Returns the program that stands for a row, or in one line why there is none."""
    for reason in _problems(row):
        return reason
    topology, num_slices = describe_topology_of(row)
    axes, dcn = axes_of(row)
    settings = row.settings.get('other_settings') or {}
    program = Program(
        model=describe_model(row),
        output_chunks=settings.get('num_vocab_tiling') or 1,
        topology=topology,
        num_slices=num_slices,
        axes=axes,
        dcn=dcn,
        rules=choose_rules(row),
        batch_size=row['global_batch'],
        sequence_length=row['seq_len'],
        num_microbatches=row['gradient_accumulation'],
        mu_dtype=(row['dtype']['optimizer'] or {}).get('mu') or 'float32',
        compiler_options=choose_options(row),
    )
    count = count_parameters(program.model) - count_left_out(program.model)
    if count != row.params_total:
        return f'our model has {count:,} parameters, and the measured one {row.params_total:,}'
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

    They count the norms before attention and MLP, but not the norms of queries, of keys, and of the
    outputs of attention and MLP.
    """
    each = 2 * model.head_dim * model.qk_norm + 2 * model.embed_dim * model.post_norms
    return each * model.num_layers


def list_programs() -> dict[str, Program]:
    """Returns each distinct program, under the name of the first row that it stands for.

    Rows that later measurements supersede come last, so that programs have the names of others.
    """
    return {name: program for program, name in _names().items()}


def find_listed(row: MeasuredRow, program: Program) -> str:
    """Returns the name of the listed program that stands for a row and its own program.

    The listed program can have fewer copies of the model over the slower network.
    """
    return _names()[_with_few_copies(row, program)]


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


# The machine of a row: topology, mesh axes, rules and compiler options.

_VECTOR_MEMORY = 'xla_tpu_scoped_vmem_limit_kib'
# In ascending order of traffic. Axes of other names are not expressed.
_AXES = ('data', 'fsdp', 'fsdp_transpose', 'context', 'tensor')


def machine_problems(row: MeasuredRow) -> Iterator[str]:
    """Yields why our partitioner does not lay out a row as it was measured."""
    parallelism = row['parallelism']
    if 'ici' not in parallelism:
        yield 'its mesh is not given by network'
        return
    for name in (*parallelism['ici'], *parallelism['dcn']):
        if name not in _AXES:
            yield f'its mesh has the axis {name!r}, for which no rules are written here'
    if row.num_devices != math.prod(size for axes in axes_of(row) for _, size in axes):
        yield 'the sizes of its mesh axes do not multiply to its devices'


def describe_topology_of(row: MeasuredRow) -> tuple[str, int]:
    """Returns the name of the described machine, and the number of its slices."""
    hardware = row['hardware']
    if hardware['topology']:
        return hardware['topology'], row.num_slices
    return f'{row.chip}:{row.num_slices}x{row.num_devices // row.num_slices}', 1


def axes_of(row: MeasuredRow) -> tuple[Axes, Axes]:
    """Returns the sizes of mesh axes within slices or hosts, and over them if there are several."""
    ici, dcn = row['parallelism']['ici'], row['parallelism']['dcn']
    used = [name for name in _AXES if ici.get(name, 1) * dcn.get(name, 1) > 1]
    within, over = (tuple((name, of.get(name, 1)) for name in used) for of in (ici, dcn))
    return within, over if row.num_slices > 1 else ()


def choose_rules(row: MeasuredRow) -> Rules:
    """Returns the rules that lay out arrays as the frameworks of the rows do.

    The batch is sharded over all axes but 'tensor' and 'context', parameters over 'fsdp' along
    'embed', over 'tensor' along heads, MLP and vocabulary, and over 'fsdp_transpose' along the MLP
    if they have one. 'context' shards tokens, and parameters as 'fsdp' does. Between the products,
    tokens are sharded over 'tensor' too: MaxText shards the width of the residual stream there,
    which gathers and scatters as many bytes.
    """
    names = [name for name, _ in axes_of(row)[0]]

    def present(*wanted: str) -> str | tuple[str, ...] | None:
        found = tuple(name for name in wanted if name in names)
        return found if len(found) > 1 else found[0] if found else None

    tensor, wide = present('tensor'), present('fsdp_transpose', 'tensor')
    experts = (('expert', None), ('expert_mlp', wide)) if row['model']['experts'] else ()
    return (
        ('layers', None),
        ('batch', present('data', 'fsdp', 'fsdp_transpose')),
        ('projection_length', present('context')),
        ('vocab', tensor),
        ('heads', tensor),
        ('kv_heads', tensor),
        ('mlp', wide),
        *experts,
        ('embed', present('fsdp', 'fsdp_transpose', 'context')),
        ('embed', present('fsdp', 'context')),
        ('kv', None),
        ('length', present('context')),
        ('residual_length', present('context', 'tensor')),
    )


def choose_options(row: MeasuredRow) -> tuple[tuple[str, int | None], ...]:
    """Returns the compiler options of a row that differ from the defaults of its chip.

    Only the size of the vector memory is taken from its flags, because it changes the estimates.
    The default of ours that keeps products with gathered weights whole stays.
    """
    if CHIPS[row.chip].platform != 'tpu':
        return ()
    limit = row['xla_flags'].get(_VECTOR_MEMORY)
    ours = {o.value for o in DEFAULT_OPTIONS if o.name == _VECTOR_MEMORY and row.chip in o.chips}
    if limit is None:
        return ((_VECTOR_MEMORY, None),) if ours else ()
    return () if {int(limit)} == ours else ((_VECTOR_MEMORY, int(limit)),)
