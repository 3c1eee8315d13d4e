"""The same run in 1, 2, 4 and 8 processes: its losses, and its checkpoints restored by the others.

  python benchmarks/process_counts.py [--folder DIR]

All runs have 8 devices and the same mesh. It prints three comparisons:

- the losses of each number of processes with one process: at most 1e-6 apart, and equal bit by bit
  among several processes;
- the losses of a run that stops halfway and continues with another number of processes, for all
  pairs, with a run that does not stop;
- the losses and the data of a run in which one of 4 processes is killed, and which continues with 2
  processes and 4 devices on another mesh, with a run that does not stop.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / 'tests/multiprocess'), str(ROOT / 'tests/train'), str(ROOT)]
os.environ['JAX_PLATFORMS'] = 'cpu'

import faulty_runs
from small import records

COUNTS = (1, 2, 4, 8)
STEPS, HALF = 8, 4


def train(folder: Path, count: int, steps: int, devices: int = 8, **settings: Any) -> None:
    """Trains to a step with several processes."""
    ending = faulty_runs.run(folder, count, devices=devices // count, steps=steps, **settings)
    assert set(ending.codes) == {0}, ending.texts


def losses(folder: Path) -> dict[int, float]:
    """The training loss of each step."""
    return {r['step']: r['train/loss'] for r in records(folder) if 'train/loss' in r}


def furthest(a: dict[int, float], b: dict[int, float]) -> float:
    """The largest relative difference between the losses of two runs."""
    assert a.keys() == b.keys(), (sorted(a), sorted(b))
    return max(abs(a[step] - b[step]) / abs(b[step]) for step in a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--folder', type=Path, help='where the runs are (a temporary folder)')
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        whole = {}
        for count in COUNTS:
            train(folder / f'half-{count}', count, HALF)
            shutil.copytree(folder / f'half-{count}', folder / f'whole-{count}')
            train(folder / f'whole-{count}', count, STEPS)
            whole[count] = losses(folder / f'whole-{count}')
            print(f'{count} processes: {furthest(whole[count], whole[1]):.1e} from 1', flush=True)
        print('several processes are bit-equal:', whole[2] == whole[4] == whole[8])
        for count in COUNTS:
            for other in COUNTS:
                if other != count:
                    run = folder / f'from-{count}-to-{other}'
                    shutil.copytree(folder / f'half-{count}', run)
                    train(run, other, STEPS)
                    apart = furthest(losses(run), whole[count])
                    print(f'{count} -> {other} processes: {apart:.1e}', flush=True)
        run = folder / 'killed'
        ending = faulty_runs.run(
            run, 4, 3, devices=2, steps=STEPS, fault='SIGKILL', moment='step 6'
        )
        train(run, 2, STEPS, devices=4, mesh=1)
        # What determines the rows of each step.
        data = [json.loads((f / 'data.json').read_text()) for f in (run, folder / 'whole-4')]
        same = data[0] == data[1]
        print(
            f'4 processes, one killed ({ending.codes}), then 2 with 4 devices and another mesh: '
            f'{furthest(losses(run), whole[4]):.1e} from the whole run; same data: {same}'
        )


if __name__ == '__main__':
    main()
