"""Forecasts of shipped configurations, next to counts by hand. Nothing runs on the machines.

Each case is forecast twice, in processes of their own, which takes one to several minutes. Then the
forecast is compared with figures that this file writes out:

- arguments: 12 bytes per parameter (float32, with two moments of AdamW), the counters, the batch.
- peak: the compiler's, next to the arguments plus the arrays that were found in its program (within
  1%), and next to the peak by formula, without a compiler (within 10%).
- wire: the bytes that a device sends, by kind and mesh axes, next to a count of the weights that
  are gathered, of the gradients that are summed, and of the activations that are exchanged.
- two runs: whether their JSON is equal, apart from "compilation".
- seconds and memory of the forecast: at most 90 s and 3 GB on two cores that do nothing else.

Results are added to a file. Cases that it has are not forecast again, so a campaign can be resumed.

Usage:
  python benchmarks/forecast_cases.py [--cases=1b,8b_fsdp] [--results=FILE] [--again] [--list]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ['JAX_PLATFORMS'] = 'cpu'

RESULTS = Path(__file__).parent / 'results' / 'forecast_cases.json'
MOST_SECONDS, MOST_BYTES = 90, 3e9
FLOAT, BFLOAT = 4, 2  # bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of a shipped model, in the letters of the counts."""

    vocab: int
    layers: int
    embed: int
    heads: int
    kv_heads: int
    head: int
    mlp: int
    tied: bool = False

    @property
    def attention(self) -> int:
        """The parameters of query, key, value and output of a layer."""
        return self.embed * self.head * 2 * (self.heads + self.kv_heads)

    @property
    def feed_forward(self) -> int:
        """The parameters of the three matrices of a layer."""
        return 3 * self.embed * self.mlp

    @property
    def norms(self) -> int:
        """The parameters of all norms: two per layer and one at the end."""
        return (2 * self.layers + 1) * self.embed

    @property
    def tables(self) -> int:
        """The parameters of the embedding and of the output."""
        return (1 if self.tied else 2) * self.vocab * self.embed

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.layers * (self.attention + self.feed_forward) + self.tables + self.norms


MODELS = {
    '125m': Model(
        vocab=32_768, layers=12, embed=768, heads=12, kv_heads=12, head=64, mlp=2048, tied=True
    ),
    '1b': Model(vocab=32_768, layers=16, embed=2048, heads=32, kv_heads=8, head=64, mlp=8192),
    '8b': Model(vocab=128_256, layers=32, embed=4096, heads=32, kv_heads=8, head=128, mlp=14_336),
    '70b': Model(vocab=128_256, layers=80, embed=8192, heads=64, kv_heads=8, head=128, mlp=28_672),
}

Wire = dict[str, float]  # bytes that a device sends, by 'kind over axes (network)'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A forecast, and what is counted by hand.

    Attributes:
      name: the name of the case.
      model: the file in configs/models.
      preset: the file in configs/partitioning.
      topology: the machine.
      batch: the number of rows of a step.
      shards: the devices that share each matrix and its moments.
      norm_shards: the devices that share the scales of norms.
      row_shards: the devices that share the batch.
      length: the tokens of a row.
      bindings: gin bindings.
      wire: counts what a device sends; None if the case compares nothing.
      rounds: the sizes of the groups in which gradients are summed and scattered.
      chunks: the columns of the output's chunks: the vocabulary with what fills the last rows.
      tensor: the devices that share a product, in tensor parallelism.
      sums_to_gather: whether the compiler gathers small arrays by sums.
      fits: whether it fits.
    """

    name: str
    model: str
    preset: str = 'fsdp'
    topology: str
    batch: int
    shards: int
    norm_shards: int
    row_shards: int
    length: int = 2048
    bindings: tuple[str, ...] = ()
    wire: Callable[[Case], Wire] | None = None
    rounds: tuple[int, ...] = ()
    chunks: int = 0
    tensor: int = 1
    sums_to_gather: bool = True
    fits: bool = True

    @property
    def sizes(self) -> Model:
        """The sizes of the model."""
        return MODELS[self.model]

    @property
    def rows(self) -> int:
        """The rows of a device."""
        return self.batch // self.row_shards

    def count_arguments(self) -> int:
        """The bytes of the arguments of a device.

        12 bytes for each parameter that a device has, the step number and two counters of the
        optimizer, and three arrays of the batch: tokens, targets and weights.
        """
        sizes = self.sizes
        matrices = (sizes.parameters - sizes.norms) // self.shards
        state = 3 * FLOAT * (matrices + sizes.norms // self.norm_shards)
        return state + 3 * 4 + 3 * 4 * self.rows * self.length


# The bytes that a device sends to sum, scatter or gather something over n devices in a ring.


def gathered(nbytes: float, n: int) -> float:
    """To gather an array of this size, or to sum it and keep a shard."""
    return nbytes * (n - 1) / n


def summed(nbytes: float, n: int) -> float:
    """To sum an array of this size on all devices: a reduce-scatter and an all-gather."""
    return 2 * gathered(nbytes, n)


def count_data_parallel(case: Case) -> Wire:
    """Every device has all parameters, and all devices sum their gradients.

    Matrices have gradients of bfloat16. A tied embedding has two: of the lookup and of the output.
    The scales of norms have gradients of float32. Three numbers of the loss are summed, too.
    """
    m, n = case.sizes, case.row_shards
    matrices = BFLOAT * (m.layers * (m.attention + m.feed_forward) + 2 * m.vocab * m.embed)
    return {'all-reduce over data (ICI)': summed(matrices + FLOAT * (m.norms + 3), n)}


def count_fsdp(case: Case) -> Wire:
    """Every device has a shard of all parameters; the rounds of the gradients are in `case.rounds`.

    Weights are gathered in bfloat16, those of layers for the forward pass and again for the
    backward pass, that of the output once. Each device looks its columns of the embedding up for
    all tokens, which are gathered (int32); its rows of the result come by an all-to-all, and so do
    their gradients. Gradients are summed and scattered, round by round; the output in its chunks.
    On the last round, arrays with heads of 64 are summed whole: they do not fill a row of a tile.
    The scales of norms are float32. They are gathered like weights, and on some machines summed for
    that, from arrays that are zero but for the own shard. Six numbers of the loss are summed.
    """
    m, n = case.sizes, case.shards
    attention, feed_forward = (BFLOAT * m.layers * k for k in (m.attention, m.feed_forward))
    output = BFLOAT * m.vocab * m.embed
    tokens, stream = 4 * case.batch * case.length, BFLOAT * case.rows * case.length * m.embed
    gathering = gathered(2 * (attention + feed_forward) + output + tokens, n)
    to_scatter = feed_forward + BFLOAT * case.chunks * m.embed + attention * (m.head >= 128)
    whole = attention * (m.head < 128)
    small = FLOAT * (m.norms + 6)  # what is summed whole: gradients of norms, and the loss
    norms = FLOAT * (m.norms + 2 * m.layers * m.embed)  # forward, and those of layers again
    if case.sums_to_gather:
        small += norms
    else:
        gathering += gathered(norms, n)
    *before, last = case.rounds
    scattering = gathered(to_scatter, n)
    for size in before:
        scattering += gathered(whole, size)
        whole /= size
    wire = {
        'all-gather over data (ICI)': gathering,
        'reduce-scatter over data (ICI)': scattering,
        'all-to-all over data (ICI)': gathered(2 * stream, n),
    }
    return wire | {'all-reduce over data (ICI)': summed(whole, last) + summed(small, n)}


def count_fsdp_tensor(case: Case) -> Wire:
    """FSDP over `data` and tensor parallelism over `model`, with tokens and heads exchanged.

    Between products, a row's tokens lie on the devices of `model`. They are gathered for the two
    products of the MLP's inputs (forward, again, and for the gradient of its output), and the sums
    of its results are scattered over the tokens (forward and backward). Attention instead has its
    weights gathered, and exchanges tokens for heads: queries, keys, values and its result, forward,
    again and backward.
    """
    m, f, t = case.sizes, case.row_shards, case.tensor
    tokens = case.rows * case.length
    stream, numbers = BFLOAT * tokens * m.embed, 4 * tokens
    heads = BFLOAT * tokens * m.head * 2 * (m.heads + m.kv_heads) / t
    query, keys = (BFLOAT * m.embed * m.head * n for n in (m.heads, 2 * m.kv_heads))
    mlp, output = BFLOAT * m.feed_forward / t, BFLOAT * m.embed
    norms = FLOAT * (2 * m.layers + 1) * m.embed
    again = FLOAT * 2 * m.layers * m.embed
    layer = mlp + query + (query + keys) / t  # over data: the last weights of attention come first
    layer_back = mlp + query + keys + query / t
    return {
        'all-gather over model (ICI)': gathered(
            (3 * m.layers + 2) * stream + 2 * m.layers * (query + keys + query / f) + 6 * numbers,
            t,
        ),
        'reduce-scatter over model (ICI)': gathered(
            (2 * m.layers + 1) * stream + m.layers * (query + (query + keys) / f), t
        ),
        'all-to-all over model (ICI)': gathered(3 * m.layers * heads, t),
        'all-reduce over model (ICI)': summed(stream + 5 * numbers, t),
        'all-gather over data (ICI)': gathered(
            2 * m.layers * layer
            + output * m.vocab / t
            + 4 * case.batch * case.length
            + norms
            + again,
            f,
        ),
        'reduce-scatter over data (ICI)': gathered(m.layers * layer_back + output * case.chunks, f),
        'all-to-all over data (ICI)': gathered(2 * stream, f),
        'all-reduce over data, model (ICI)': summed(norms + 6 * FLOAT, f * t),
    }


def count_tensor(case: Case) -> Wire:
    """Tensor parallelism: the results of two products per layer are summed, forward and backward.

    The sums of the forward pass are kept. The lookup in the embedding is summed, too, and the
    gradient of the output's input; and five numbers per token, for the loss.
    """
    tokens = case.rows * case.length
    stream = BFLOAT * tokens * case.sizes.embed
    sums = (4 * case.sizes.layers + 2) * stream + 5 * FLOAT * tokens
    return {'all-reduce over model (ICI)': summed(sums, case.tensor)}


def count_dcn(case: Case) -> Wire:
    """Two slices, each with a shard of all parameters on each device, sum their shards' gradients.

    The gradients of matrices are bfloat16, and those of the scales of norms float32 and whole. That
    of the last norm and the loss fill whole tiles of 1,024 numbers, and another one a row of 128.
    """
    m = case.sizes
    shard = BFLOAT * (m.parameters - m.norms) / case.shards
    last = 1024 * (m.embed // 1024 + 1) + 128
    norms = FLOAT * (2 * m.layers * m.embed + last)
    return {'all-reduce over replica (DCN)': summed(shard + norms, 2)}


CASES = (
    Case(
        name='125m',
        model='125m',
        topology='v5e:2x2',
        batch=32,
        shards=4,
        norm_shards=4,
        row_shards=4,
        wire=count_fsdp,
        rounds=(4,),
        chunks=32_768,
    ),
    Case(
        name='125m_data_parallel',
        model='125m',
        preset='data_parallel',
        topology='v5e:2x2',
        batch=32,
        shards=1,
        norm_shards=1,
        row_shards=4,
        wire=count_data_parallel,
    ),
    Case(
        name='125m_tensor',
        model='125m',
        preset='tensor',
        topology='v5e:2x2',
        batch=8,
        shards=4,
        norm_shards=1,
        row_shards=1,
        wire=count_tensor,
        tensor=4,
        bindings=('NUM_PARTITIONS = 4',),
    ),
    Case(
        name='1b',
        model='1b',
        topology='v5e:4x4',
        batch=32,
        shards=16,
        norm_shards=16,
        row_shards=16,
        wire=count_fsdp,
        rounds=(4, 4),
        sums_to_gather=False,
        chunks=32_768,
    ),
    Case(
        name='8b_fsdp',
        model='8b',
        topology='v5p:4x4x4',
        batch=128,
        shards=64,
        norm_shards=64,
        row_shards=64,
        wire=count_fsdp,
        rounds=(16, 4),
        chunks=8 * 16_128,
    ),
    Case(
        name='8b_fsdp8_tensor8',
        model='8b',
        preset='fsdp_tensor',
        topology='v5p-128',
        batch=128,
        shards=64,
        norm_shards=8,
        row_shards=8,
        wire=count_fsdp_tensor,
        tensor=8,
        chunks=16_384,
        bindings=('NUM_PARTITIONS = 8',),
    ),
    Case(
        name='70b_v5p',
        model='70b',
        preset='fsdp_tensor',
        topology='v5p:8x8x8',
        batch=512,
        shards=512,
        norm_shards=64,
        row_shards=64,
        wire=count_fsdp_tensor,
        tensor=8,
        chunks=16_384,
    ),
    Case(
        name='70b_v6e',
        model='70b',
        preset='fsdp_tensor',
        topology='v6e:16x16',
        batch=256,
        shards=256,
        norm_shards=32,
        row_shards=32,
        wire=count_fsdp_tensor,
        tensor=8,
        chunks=16_384,
    ),
    Case(
        name='8b_two_slices',
        model='8b',
        topology='v5e:16x16',
        batch=512,
        shards=256,
        norm_shards=256,
        row_shards=512,
        wire=count_dcn,
        bindings=('NUM_SLICES = 2',),
    ),
    Case(
        name='8b_h100',
        model='8b',
        topology='h100:1x8',
        batch=64,
        shards=8,
        norm_shards=8,
        row_shards=8,
    ),
    Case(
        name='8b_data_parallel',
        model='8b',
        preset='data_parallel',
        topology='v5p:4x4x4',
        batch=128,
        shards=1,
        norm_shards=1,
        row_shards=64,
        fits=False,
    ),
)


def measure(case: Case) -> dict[str, Any]:
    """Forecasts a case, and returns its figures and the text of its JSON without times."""
    from partitioning.aot import forecast
    from partitioning.aot.forecast_tables import wire_bytes
    from train.forecasting import plan_step
    from train.gin_config import find_config, load_config

    names = ('runs/pretrain', f'models/{case.model}', f'partitioning/{case.preset}')
    files = [f'configs/{name}.gin' for name in (*names, 'runs/forecast')]
    bindings = [f"TOPOLOGY = '{case.topology}'", f'BATCH_SIZE = {case.batch}', *case.bindings]
    load_config(files, bindings)
    config = find_config()
    planned = plan_step(config)
    made = forecast(config.partitioner, planned.step, *planned.arguments)
    used = resource.getrusage(resource.RUSAGE_SELF)
    held = made.as_dict()
    del held['compilation']
    memory = made.memory
    return {
        'fits': made.fits,
        'back_end': made.back_end_version,
        'mesh': dict(made.mesh),
        'memory': {k: v for k, v in held['memory'].items() if k != 'buffers'},
        'buffers': [[array.array, array.nbytes, array.source] for array, _ in memory.buffers[:5]],
        'wire': {
            f'{kind} over {axes} ({network})': sum(sizes)
            for (network, axes, kind), sizes in sorted(wire_bytes(made).items())
        },
        'model_flops': made.model_flops,
        'program_flops': made.program_flops,
        'time': made.time.seconds if made.time else None,
        'mfu': made.mfu,
        'notes': list(made.notes),
        'warnings': list(made.warnings),
        'seconds': made.compilation.seconds,
        'cpu_seconds': used.ru_utime + used.ru_stime,
        'peak_rss': made.compilation.peak_rss,
        'json': json.dumps(held),
    }


def measure_twice(case: Case) -> dict[str, Any] | None:
    """Forecasts a case in two processes; prints why it fails, and returns None."""
    found = []
    for _ in range(2):
        command = [sys.executable, __file__, f'--measure={case.name}']
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ['no message']
            print(f'{case.name} failed: {lines[-1][:400]}', flush=True)
            return None
        found.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = found
    equal = first.pop('json') == second.pop('json')
    fastest = {k: min(first[k], second[k]) for k in ('seconds', 'cpu_seconds')}
    return first | fastest | {'two_runs_are_equal': equal}


def print_results(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints each case with its counts; a figure that misses its mark has a '!'."""
    for case in CASES:
        if (found := results.get(case.name)) is None:
            continue
        memory, counted = found['memory'], case.count_arguments()
        print(f'{case.name}: {case.model} {case.preset} on {case.topology}, batch {case.batch}')
        marked(f'  fits: {found["fits"]}, by {found["back_end"]}', found['fits'] == case.fits)
        marked(
            f'  arguments: {memory["arguments"]:,} bytes, by hand {counted:,}',
            memory['arguments'] == counted,
        )
        print(f'  peak by the compiler: {memory["peak"]:,}')
        for name, most in (('live', 0.01), ('analytic_peak', 0.1)):
            if memory[name]:
                off = memory[name] / memory['peak'] - 1
                marked(f'  {name}: {memory[name]:,} ({off:+.2%})', abs(off) <= most)
        for line, is_right in compare_wire(case, found['wire']):
            marked(f'  {line}', is_right)
        marked(
            f'  forecast in {found["seconds"]:.0f} s ({found["cpu_seconds"]:.0f} s of CPU), '
            f'{found["peak_rss"] / 1e9:.2f} GB',
            found['seconds'] <= MOST_SECONDS and found['peak_rss'] <= MOST_BYTES,
        )
        marked(f'  two runs are equal: {found["two_runs_are_equal"]}', found['two_runs_are_equal'])


def marked(line: str, is_right: bool) -> None:
    """Prints a line, with a mark if it misses its aim."""
    print(line if is_right else f'{line} !')


def compare_wire(case: Case, found: Mapping[str, float]) -> list[tuple[str, bool]]:
    """Returns a line for each kind of exchange, and whether it is as counted."""
    counted = {} if case.wire is None else case.wire(case)
    lines = []
    for key in sorted({*found, *counted}, key=lambda k: -found.get(k, 0)):
        line = f'{key}: {found.get(key, 0):,.0f} bytes'
        if key not in counted:
            lines.append((line, True))
            continue
        off = found.get(key, 0) / counted[key] - 1
        lines.append((f'{line}, by hand {counted[key]:,.0f} ({off:+.2%})', abs(off) <= 1e-3))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--cases', help='the cases, separated by commas (all)')
    parser.add_argument('--results', type=Path, default=RESULTS, help=f'({RESULTS.name})')
    parser.add_argument('--again', action='store_true', help='forecast cases that the file has')
    parser.add_argument('--list', action='store_true', help='print the cases')
    parser.add_argument('--measure', help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    known = {case.name: case for case in CASES}
    if arguments.measure:
        print(json.dumps(measure(known[arguments.measure])))
        return
    names = list(known) if arguments.cases is None else arguments.cases.split(',')
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f'no case {unknown[0]!r}: the cases are {", ".join(known)}')
    if arguments.list:
        print(
            '\n'.join(
                f'{known[n].name:<20}{known[n].topology:<12}batch {known[n].batch}' for n in names
            )
        )
        return
    path = arguments.results
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in names:
        if arguments.again or name not in results:
            figures = measure_twice(known[name])
            if figures is not None:
                results[name] = figures
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(results, indent=1) + '\n')
    print_results({name: results[name] for name in names if name in results})


if __name__ == '__main__':
    main()
