"""The machines of measured rows: topology, mesh axes, rules and compiler options."""

from __future__ import annotations

import math
from collections.abc import Iterator

from partitioning.hardware import CHIPS, DEFAULT_OPTIONS

from .program import Axes, Rules
from .rows import MeasuredRow

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
    if row.num_devices != math.prod(size for _, size in (*ici_axes(row), *dcn_axes(row))):
        yield 'the sizes of its mesh axes do not multiply to its devices'


def describe_topology_of(row: MeasuredRow) -> tuple[str, int]:
    """Returns the name of the described machine, and the number of its slices."""
    hardware = row['hardware']
    if hardware['topology']:
        return hardware['topology'], row.num_slices
    return f'{row.chip}:{row.num_slices}x{row.num_devices // row.num_slices}', 1


def ici_axes(row: MeasuredRow) -> Axes:
    """Returns the size of each mesh axis within a slice or a host."""
    return _sizes(row, 'ici')


def dcn_axes(row: MeasuredRow) -> Axes:
    """Returns the size of each mesh axis over slices or hosts; empty with one of them."""
    return _sizes(row, 'dcn') if row.num_slices > 1 else ()


def _sizes(row: MeasuredRow, network: str) -> Axes:
    ici, dcn = row['parallelism']['ici'], row['parallelism']['dcn']
    used = [name for name in _AXES if ici.get(name, 1) * dcn.get(name, 1) > 1]
    sizes = {'ici': ici, 'dcn': dcn}[network]
    return tuple((name, sizes.get(name, 1)) for name in used)


def choose_rules(row: MeasuredRow) -> Rules:
    """Returns the rules that lay out arrays as the frameworks of the rows do.

    The batch is sharded over all axes but 'tensor' and 'context', parameters over 'fsdp' along
    'embed', over 'tensor' along heads, MLP and vocabulary, and over 'fsdp_transpose' along the MLP
    if they have one. 'context' shards tokens, and parameters as 'fsdp' does. Between the products,
    tokens are sharded over 'tensor' too: MaxText shards the width of the residual stream there,
    which gathers and scatters as many bytes.
    """
    names = [name for name, _ in ici_axes(row)]

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
