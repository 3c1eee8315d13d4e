"""The candidates of a search: every layout that divides the sizes of a run, and every setting."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from partitioning.hardware import OptionValue
from train.planning.candidates import Candidate, RematChoice, RunSizes
from train.planning.presets import Layout, count_shards

Options = tuple[tuple[str, OptionValue | None], ...]
# The sizes of a run, each with the logical axis that divides it.
_DIVIDED = {
    'num_heads': 'heads',
    'num_kv_heads': 'kv_heads',
    'mlp_dim': 'mlp',
    'vocab_size': 'vocab',
    'sequence_length': 'residual_length',
    'num_layers': 'layers',
    'embed_dim': 'embed',
}

# The mesh axes of the presets that a search chooses between. Runs with others keep their layout.
_KNOWN_AXES = {'replica', 'data', 'fsdp', 'model', 'group'}
_WINDOWED = 'xla_jf_spmd_threshold_for_windowed_einsum_mib'
_TILES = 'xla_tpu_scoped_vmem_limit_kib'
# The compiler options that change the time of a step by more than the forecast's own error, in
# addition to the defaults of a chip: the compiler's own windowed products, and larger tiles.
_OPTIONS: dict[str, tuple[Options, ...]] = {
    'v5e': ((), ((_TILES, 64 * 1024),), ((_WINDOWED, None),)),
    'v5p': ((), ((_TILES, 64 * 1024),), ((_WINDOWED, None),)),
    'v6e': ((), ((_WINDOWED, None),)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
    """The values of each setting that a search tries.

    Attributes:
      layouts: the layouts, by default all that the presets and the machine allow.
      remats: what the backward pass recomputes.
      output_chunks: the numbers of chunks of the output layer; None is the smallest number whose
        logits are small.
    """

    layouts: Sequence[Layout] | None = None
    num_microbatches: Sequence[int] = (1, 2, 4)
    remats: Sequence[RematChoice] = ('none', 'dots', 'full', 'offload')
    output_chunks: Sequence[int | None] = (None, 1)
    compiler_options: Sequence[Options] = ((),)

    @classmethod
    def of_layouts(
        cls,
        layouts: Sequence[Layout] | None = None,
        num_microbatches: Sequence[int] = (1,),
    ) -> Choices:
        """Returns choices that leave everything else as it needs the least memory."""
        return cls(
            layouts=layouts,
            num_microbatches=num_microbatches,
            remats=('full',),
            output_chunks=(None,),
        )


def choices_for(chip: str) -> Choices:
    """Returns the choices with the compiler options that matter on a chip."""
    return Choices(compiler_options=_OPTIONS.get(chip, ((),)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Space:
    """The candidates of a search. Others were dropped, each number of them for a reason."""

    candidates: tuple[Candidate, ...]
    dropped: Mapping[str, int]


def list_space(run: RunSizes, choices: Choices | None = None) -> Space:
    """Lists the candidates for a run, in a fixed order.

    `choices` are the values of each setting, by default `Choices()`.
    """
    choices = choices or Choices()
    layouts = list(_list_layouts(run)) if choices.layouts is None else choices.layouts
    remats: Sequence[RematChoice | None] = choices.remats if run.model else (None,)
    chunks = choices.output_chunks if run.output else (None,)
    # The empty dict removes all options; more cannot be said in addition to it.
    fixed = not run.compiler_options
    options: Sequence[Options] = ((),) if fixed else choices.compiler_options
    candidates, dropped = [], collections.Counter[str]()
    others = itertools.product(choices.num_microbatches, remats, chunks, options)
    for layout, (microbatches, remat, count, option) in itertools.product(layouts, list(others)):
        if (_WINDOWED, None) in option and not _divides_products(run, layout):
            dropped['the same program as without its compiler options'] += 1
            continue
        if reason := _find_problem(run, layout, microbatches):
            dropped[reason] += 1
            continue
        candidates.append(
            Candidate(
                layout=layout,
                num_microbatches=microbatches,
                remat=remat,
                output_chunks=count,
                compiler_options=option,
            )
        )
    return Space(candidates=tuple(candidates), dropped=dict(dropped))


def _divides_products(run: RunSizes, layout: Layout) -> bool:
    """Whether a layout may divide heads or the MLP, so that a product needs parts of others.

    Without that, compilers made the same programs with and without windows in 12 of 12 cases.
    """
    shards = count_shards(layout, run.num_devices) if layout.preset else None
    return shards is None or shards['mlp'] > 1


def _find_problem(run: RunSizes, layout: Layout, microbatches: int) -> str:
    """Why a layout is not possible, or ''."""
    if not layout.preset:
        return ''
    shards = count_shards(layout, run.num_devices)
    if shards is None:
        return 'the number of devices cannot be divided'
    if layout.preset == 'context':  # each device has an early and a late part of a sequence
        shards['residual_length'] *= 2
    sizes = {**run.model, 'sequence_length': run.sequence_length or 0}
    needs = [(sizes.get(size, 0), size, shards[name]) for size, name in _DIVIDED.items()]
    needs.append((run.batch_size, 'the batch', shards['batch'] * run.num_slices * microbatches))
    return next((f'{name} cannot be divided' for size, name, n in needs if size % n), '')


def _list_layouts(run: RunSizes) -> Iterator[Layout]:
    """The layouts of the presets for a run, the plainest first."""
    if not run.model or not {*run.axes} <= _KNOWN_AXES | {'context', 'stage'}:
        yield Layout('')
        return
    divisors = _divisors(run.num_devices)
    if 'context' in run.axes:
        yield from _with_tensor('context', 'CONTEXT_PARTITIONS', divisors)
        return
    if 'stage' in run.axes:
        yield from _with_tensor('pipeline', 'STAGES', divisors)
        return
    yield Layout('fsdp')
    yield Layout('zero')
    for size in divisors[1:-1]:
        yield Layout('three_d', (('FSDP_PARTITIONS', size), ('NUM_PARTITIONS', 1)))
    heads = run.model['num_kv_heads']
    for size in divisors[1:]:
        if size <= heads:
            yield Layout('fsdp_tensor', (('NUM_PARTITIONS', size),))
        elif size % heads == 0:
            groups = size // heads
            yield Layout('few_kv_heads', (('NUM_PARTITIONS', heads), ('HEAD_GROUPS', groups)))


def _with_tensor(preset: str, macro: str, divisors: Sequence[int]) -> Iterable[Layout]:
    for size in divisors[1:]:
        for tensor in divisors:
            yield Layout(preset, ((macro, size), ('NUM_PARTITIONS', tensor)))


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
