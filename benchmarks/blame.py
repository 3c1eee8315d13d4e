"""Seeds faults into training programs, and asks `explain_program` for their cause.

  python benchmarks/blame.py [--seed 1] [--count 60] [--folder build/blame]

Each fault is a change of one line in the source of a program, or of one rule or layout. Every case
compiles the program with the fault for 8 virtual CPU devices, and takes the exchanges, the buffers
and the copies that the program without the fault does not have. `find_change` looks at their
causes, compiles with at most 6 changes, and answers with the one that saves the most. The answer is
right if it names the line or the rule that was changed. It is confirmed if its change removes at
least 80% of the bytes that the fault added to exchanges and to the peak of the memory. The column
'first' counts how often the largest cause is right before anything is compiled again. Faults that
add less than 1% are drawn again.

The results are written as they come, and the command continues where it stopped. The faults of
seed 0 were used to write the code. `blame_programs/faults/drawing.py` says which faults the other
seeds draw, and `results/blame.md` what was found, and which figures are blind.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import importlib.machinery
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    'JAX_PLATFORMS': 'cpu',
    'JAX_NUM_CPU_DEVICES': '8',
    # The layout of a program does not depend on how fast its kernels are.
    'XLA_FLAGS': '--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true',
}
os.environ.update(ENVIRONMENT | os.environ)
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax
from jax.sharding import PartitionSpec

from benchmarks.blame_programs.faults.drawing import draw_faults
from benchmarks.campaigns import read_results, write_results
from meshwright import read_costs
from meshwright.causes import CompiledFunction, describe_arguments, explain_program, find_change

LEAST = 0.01  # the share of exchanged bytes and peak memory that a fault has to add
FRESH = ('benchmarks.blame_programs', 'train.models', 'train.objectives', 'train.running.steps')
REMOVED = 0.8  # the share of what it added that a confirmed change removes


def run_case(program: str, fault: dict[str, Any] | None, known: dict[str, Any] | None) -> Any:
    """Compiles a program with a fault, and judges the explanation."""
    function, explanation = explain(program, fault)
    found = list_found(explanation)
    result: dict[str, Any] = {
        'exchanged': sum(c.total_bytes for c in function.costs.collectives),
        'peak': function.costs.memory.peak,
        'jax': jax.__version__,
    }
    if fault is None:
        return {**result, 'found': sorted(collections.Counter(key for key, _, _ in found).items())}
    assert known is not None
    before = known['exchanged'] + known['peak']
    result['added'] = added = result['exchanged'] + result['peak'] - before
    if added < LEAST * before:
        return {**result, 'harmless': True}
    left = collections.Counter(dict(map(tuple, known['found'])))
    new = []
    for key, nbytes, cause in found:
        if left[key] > 0:
            left[key] -= 1
        elif cause is not None and nbytes >= LEAST * added:
            new.append((nbytes, key, cause))
    new.sort(key=lambda item: (-item[2].suspect, -bool(item[2].all_changes), -item[0]))
    result['causes'] = [[nbytes, key, show(cause)] for nbytes, key, cause in new[:6]]
    if not new:
        return {**result, 'first': False, 'right': False, 'confirmed': False}
    result['first'] = is_right(new[0][2], fault)
    return {**result, **judge(function, [(n, cause) for n, _, cause in new], fault, before, added)}


@contextlib.contextmanager
def edited_source(fault: dict[str, Any] | None) -> Iterator[None]:
    """Makes Python import the file of a fault with a part of its text replaced."""
    for name in list(sys.modules):
        if name.startswith(FRESH) and '.faults' not in name:
            del sys.modules[name]
    loader: Any = importlib.machinery.SourceFileLoader
    original = loader.get_code

    def get_code(self: Any, name: str) -> Any:
        if fault is None or Path(self.path) != ROOT / fault.get('file', '-'):
            return original(self, name)
        path, old = Path(self.path), fault['old']
        text = path.read_text()
        if text.count(old) != 1:
            raise ValueError(f'{path} has {text.count(old)} times {old!r}, not once')
        return compile(text.replace(old, fault['new']), str(path), 'exec', dont_inherit=True)

    loader.get_code = get_code
    try:
        yield
    finally:
        loader.get_code = original


def explain(program: str, fault: dict[str, Any] | None) -> Any:
    """Compiles a program, and explains it."""
    jax.clear_caches()
    with edited_source(fault):
        module = importlib.import_module(f'benchmarks.blame_programs.{program}')
    rules: Any = ()
    if hasattr(module, 'RULES'):
        rules = changed(module.RULES, (fault or {}).get('rules', {}))

        def retrace(rules: Any) -> Any:
            _, step, args = module.build(list(rules))
            return step.trace(*args)

        partitioner, step, args = module.build(rules)
        mesh, plan_rows = partitioner.mesh, partitioner.plan(args[0]).rows
    else:
        layout = {} if (fault or {}).get('file') else (fault or {}).get('layout', {})
        specs = {
            k: PartitionSpec(*(tuple(a) if isinstance(a, list) else a for a in v))
            for k, v in layout.items()
        }
        mesh, step, args = module.build({**module.LAYOUT, **specs})
        plan_rows, retrace = (), None
    with jax.set_mesh(mesh) if not rules else contextlib.nullcontext():
        traced = step.trace(*args)
        compiled = traced.lower().compile()
    costs = read_costs(compiled, mesh)
    rows = describe_arguments(traced, compiled, plan_rows)
    explanation = explain_program(
        compiled.as_text(), traced.jaxpr, costs, mesh=mesh, rows=rows, rules=rules
    )
    function = CompiledFunction(
        traced=traced,
        compiled=compiled,
        costs=costs,
        mesh=mesh,
        rules=rules,
        rows=rows,
        retrace=retrace,
    )
    return function, explanation


def changed(rules: Any, changes: dict[str, Any]) -> list[tuple[str, Any]]:
    """The rules with other mesh axes for some names."""
    return [
        (name, tuple(a) if isinstance(a := changes.get(name, axes), list) else a)
        for name, axes in rules
    ]


def list_found(explanation: Any) -> list[tuple[str, float, Any]]:
    """Everything that an explanation is about: a key to compare programs, bytes, and the cause."""
    found: list[tuple[str, float, Any]] = []
    for c, cause in explanation.collectives:
        key = f'{c.kind} {c.axes} {c.arrays} x{c.count}'
        found.append((key, c.total_bytes, cause))
    for live, cause in explanation.buffers:
        found.append((f'buffer {live.array} x{live.count}', live.nbytes, cause))
    for row, cause in explanation.replicated:
        found.append((f'copies {row.path} {row.shard_shape}', row.bytes_per_device, cause))
    return found


def show(cause: Any) -> dict[str, Any]:
    return {
        'source': below_root(cause.source),
        'array': cause.array,
        'names': cause.logical_axes,
        'rule': cause.rule,
        'why': below_root(cause.why),
        'suspect': cause.suspect,
        'change': below_root(cause.change),
        'changes': [below_root(change) for change in cause.all_changes],
    }


def below_root(text: Any) -> str:
    """A text whose paths begin in the checkout."""
    return str(text).replace(f'{ROOT}/', '')


def is_right(cause: Any, fault: dict[str, Any]) -> bool:
    """Whether a cause names the rule, the layout or the line of a fault."""
    if fault['kind'] == 'whole result':
        return 'returns it' in cause.why
    if any(f'({name!r}, ' in cause.rule + cause.change for name in fault.get('rules', ())):
        return True
    if 'layout' in fault:
        words = [path.rpartition('/')[2] for path in fault['layout']]
        return any(re.search(rf'\b{word}\b', f'{cause.array} {cause.change}') for word in words)
    return 'file' in fault and is_line_of(cause.source, fault)


def is_line_of(source: str, fault: dict[str, Any]) -> bool:
    """Whether a 'file:line' is one of those that a fault has changed."""
    text = (ROOT / fault['file']).read_text()
    first = text[: text.index(fault['old'])].count('\n') + 1
    last = first + fault['old'].rstrip('\n').count('\n')
    path, _, line = source.rpartition(':')
    return path.endswith(fault['file']) and first <= int(line or 0) <= last


def judge(
    function: Any, found: Any, fault: dict[str, Any], before: float, added: float
) -> dict[str, Any]:
    """What the tool suggests, and how much of what the fault added is left with the change."""

    def rewrite(change: Any) -> Any:
        """The author of the program writes what the change says, if it is for the line."""
        if 'suggested' not in fault or not is_line_of(change.source, fault):
            return None
        other, _ = explain(fault['program'], {**fault, 'new': fault['suggested']})
        return other.traced

    def left(tried: Any) -> float:
        return (tried.exchanged[1] + tried.peak[1] - before) / added

    best = find_change(function, found, rewrite=rewrite)
    if best is None:
        return {'right': False, 'confirmed': False}
    rest = None if best.saved is None else left(best.saved)
    return {
        'right': is_right(best.cause, fault),
        'confirmed': rest is not None and rest <= 1 - REMOVED,
        'left': rest,
        'answer': show(best.cause),
        'tried': [[below_root(t.change), left(t)] for t in best.tried],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--count', type=int, default=60)
    parser.add_argument('--folder', type=Path, default=ROOT / 'build' / 'blame')
    args = parser.parse_args()
    run_campaign(args.seed, args.count, args.folder)


def run_campaign(seed: int, count: int, folder: Path) -> None:
    """Runs cases until there are enough that do harm, and prints the table."""
    path = folder / f'seed_{seed}.json'
    results = read_results(path)
    for fault in draw_faults(seed):
        done = [r for r in results.values() if 'fault' in r and not r.get('harmless')]
        if len(done) >= count:
            break
        program, key = fault['program'], fault['key']
        if program not in results:
            results[program] = run_case(program, None, None)
        if key not in results:
            results[key] = {'fault': fault, **attempt(fault, results[program])}
            shown = {k: results[key].get(k) for k in ('harmless', 'right', 'confirmed', 'error')}
            print(f'{key}\n   ', shown, flush=True)
        write_results(path, results)
    print(table(results))


def attempt(fault: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Runs a case; an exception counts as a wrong answer."""
    try:
        return run_case(fault['program'], fault, known)
    except Exception as error:  # such as a fault that makes the program invalid
        text = f'{type(error).__name__}: {error}'.splitlines()[0]
        return {'error': text[:300], 'right': False, 'confirmed': False}


def table(results: dict[str, Any]) -> str:
    """The number of faults of each kind, of right answers and of confirmed changes."""
    columns = ('cases', 'first', 'right', 'confirmed', 'harmless')
    rows: dict[str, Any] = collections.defaultdict(collections.Counter)
    for result in results.values():
        if 'fault' in result:
            counted = {**result, 'cases': not result.get('harmless')}
            for kind in (result['fault']['kind'], 'all'):
                rows[kind].update({name: int(counted.get(name, 0)) for name in columns})
    lines = [f'| fault | {" | ".join(columns)} |', '|---|---|---|---|---|---|']
    for kind in sorted(rows, key=lambda kind: (kind == 'all', kind)):
        counts = ' | '.join(str(rows[kind][name]) for name in columns)
        lines.append(f'| {kind} | {counts} |')
    return '\n'.join(lines)


if __name__ == '__main__':
    main()
