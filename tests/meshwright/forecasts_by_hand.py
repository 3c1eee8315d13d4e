"""Forecasts that are written by hand, whose figures tests know."""

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh
from mock_devices import tpus

from meshwright.causes import Cause
from meshwright.program.collectives import Collective
from meshwright.program.peak_memory import LiveArray
from meshwright.report.forecasts import Compilation, Forecast, MemoryForecast, Replicated
from meshwright.time import Constant, StepTime, TimePart, Work
from partitioning.hardware import CHIPS
from partitioning.mesh import axis_rings, find_placement
from partitioning.plan import make_row
from partitioning.rules import ResolvedDimension

GIB = 2**30
MIB = 2**20


def dimension(name, axes):
    rule = (name, axes)
    reason = 'a rule shards it' if axes else 'a rule replicates it'
    return ResolvedDimension(name, axes, rule, (), reason, wanted=axes)


def rows(mesh, *arrays):
    """Rows of a plan, from (path, shape, dtype, role, [(logical axis, mesh axes), ...])."""
    return tuple(
        make_row(
            path,
            jax.ShapeDtypeStruct(shape, dtype),
            mesh,
            [dimension(name, axes) for name, axes in dimensions],
            role,
        )
        for path, shape, dtype, role, dimensions in arrays
    )


def mesh_of(devices, **sizes):
    held = np.empty(len(devices), dtype=object)
    held[:] = devices
    return Mesh(held.reshape([*sizes.values()]), [*sizes])


MESH = mesh_of(tpus((4, 4, 4), 'TPU v5'), fsdp=16, tensor=4)
LAYERS = ('layers', None)
EMBED, MLP, VOCAB = ('embed', 'fsdp'), ('mlp', 'tensor'), ('vocab', 'tensor')
ARRAYS = rows(
    MESH,
    ('params/embedding', (128_256, 4096), np.float32, 'parameters', [VOCAB, EMBED]),
    ('params/layers/mlp/up', (32, 4096, 14_336), np.float32, 'parameters', [LAYERS, EMBED, MLP]),
    ('params/layers/mlp/down', (32, 14_336, 4096), np.float32, 'parameters', [LAYERS, MLP, EMBED]),
    ('params/norm/scale', (4096,), np.float32, 'parameters', [('norm', None)]),
    ('opt_state/mu/embedding', (128_256, 4096), np.float32, 'optimizer', [VOCAB, EMBED]),
    ('batch/tokens', (64, 2048), np.int32, 'other', [('batch', 'fsdp'), ('length', None)]),
)

GATHER = Cause(
    source='train/models/transformer.py:88',
    array='params/layers/mlp/up',
    logical_axes=('layers', 'embed', 'mlp'),
    rule="('embed', 'fsdp')",
    why='Each layer gathers its weights before it uses them.',
)
TABLE = Cause(
    source='train/models/embedding.py:41',
    array='params/embedding',
    logical_axes=('vocab', 'embed'),
    rule="('vocab', 'tensor')",
    why='The whole table is gathered before the lookup.',
    change="constrain(embedding, ('vocab', 'embed'))",
    confirmed=True,
)


# The work of a step of v5e that does nothing.
NOTHING = Work(
    origin='jaxpr',
    chip='v5e',
    matmul_flops=0.0,
    matmul_seconds=None,
    other_seconds=None,
    other_bytes=0.0,
    kernels=(),
    collectives=(),
    host_bytes=0.0,
)


def collective(kind, axes, size, arrays, wire_bytes, count, source):
    return Collective(
        kind=kind,
        network='ici',
        axes=axes,
        group_size=size,
        arrays=arrays,
        wire_bytes=wire_bytes,
        count=count,
        asynchronous=True,
        op_name='jit(train_step)/dot_general',
        source=source,
    )


CHIP = CHIPS['v5p']
MEMORY = MemoryForecast(
    limit=CHIP.hbm_bytes,
    peak=7 * GIB + 512 * MIB,
    arguments=3 * GIB + MIB,
    parameters=GIB,
    optimizer=2 * GIB,
    batch=MIB,
    other=0,
    temporaries=5 * GIB,
    gradients=GIB,
    activations=3 * GIB,
    analytic_peak=7 * GIB + 256 * MIB,
    buffers=(
        (
            LiveArray(
                array='f32[4,2048,32064]',
                nbytes=1_050_673_152,
                count=1,
                op_name='jit(train_step)/output/dot_general',
                source='train/models/output.py:63',
            ),
            None,
        ),
        (
            LiveArray(
                array='bf16[32,4,2048,4096]',
                nbytes=2 * GIB,
                count=1,
                op_name='jit(train_step)/scan',
                source='train/models/transformer.py:51',
            ),
            GATHER,
        ),
    ),
)


def step_time(low, seconds, high, parts, constants=()):
    """A step time, from (name, seconds, exposed seconds) of its parts."""
    made = tuple(TimePart(name=name, seconds=s, exposed=e) for name, s, e in parts)
    return StepTime(seconds=seconds, low=low, high=high, parts=made, constants=constants)


TIME = step_time(
    *(0.76, 0.8, 0.85),
    [
        ('matrix products', 0.55, 0.55),
        ('all-gather over fsdp (ICI)', 0.4, 0.15),
        ('other operations', 0.08, 0.08),
        ('overhead', 0.02, 0.02),
    ],
    (
        Constant(
            name='share of the peak rate of matrix products',
            value=0.82,
            unit='',
            source='fitted on 14 measured steps of v5p',
        ),
        Constant(name='ICI link', value=1e11, unit='bytes/s', source=CHIP.source),
    ),
)
LAYERS_FILE = 'train/models/transformer.py'
COLLECTIVES = (
    ('all-gather', ('fsdp',), 16, ('bf16[4096,14336]',), 5e8, 96, f'{LAYERS_FILE}:88'),
    (
        'all-reduce',
        ('tensor',),
        4,
        ('bf16[4,2048,4096]',),
        1e8,
        64,
        'train/models/transformer.py:95',
    ),
    ('all-gather', ('tensor',), 4, ('f32[32064,256]',), 3.6e9, 1, 'train/models/embedding.py:41'),
)


def make_forecast(**changes):
    """The forecast of a train step on 64 v5p: 7.5 of 95.73 GiB, 800 ms, 58 GB over two axes."""
    gather, reduce, table = (collective(*settings) for settings in COLLECTIVES)
    reduce = dataclasses.replace(reduce, asynchronous=False)
    scale = Replicated(
        path='params/norm/scale',
        nbytes=16_384,
        axes=('fsdp', 'tensor'),
        reason='norm: a rule replicates it',
    )
    made = Forecast(
        function='train_step',
        topology='v5p:4x4x4',
        num_slices=1,
        chip=CHIP,
        num_devices=64,
        mesh={'fsdp': 16, 'tensor': 4},
        back_end='tpu',
        back_end_version='libtpu 0.0.52',
        memory=MEMORY,
        model_flops=0.54 * 0.8 * CHIP.peak_flops,
        program_flops=3e14,
        time=TIME,
        collectives=((gather, GATHER), (reduce, None), (table, TABLE)),
        replicated=(scale,),
        warnings=(),
        notes=('The peak and the exchanged bytes come from the compiled program.',),
        compilation=Compilation(seconds=31.0, peak_rss=GIB + 512 * MIB),
        arrays=ARRAYS,
        rings=tuple(axis_rings(MESH)),
        placement=find_placement(MESH),
    )
    return dataclasses.replace(made, **changes)
