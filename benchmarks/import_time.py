"""The cost of imports, compared with `import jax`, in time and memory.

Run: python benchmarks/import_time.py [--rounds 15]

`import partitioning` loads a module only when one of its names is used, so the first use,
`from partitioning import PjitPartitioner`, is measured too. So is `import meshwright`, which must
take at most 1.1 times as long as `import jax`. Each statement runs in a fresh
interpreter, and the statements alternate. `seconds` is the median time of the statement, and
`peak MiB` is the median peak memory of the process. The ratios are relative to `import jax`.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys

from benchmarks.timing import medians

_CODE = """
import resource, time
start = time.perf_counter()
{statement}
seconds = time.perf_counter() - start
print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


_STATEMENTS = {
    'import jax': 'import jax',
    'import partitioning': 'import partitioning',
    'import meshwright': 'import meshwright',
    'PjitPartitioner': 'from partitioning import PjitPartitioner',
}


def measure(statement: str) -> tuple[float, float]:
    """The seconds and the peak MiB of an import statement in a fresh interpreter."""
    code = _CODE.format(statement=statement)
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    seconds, peak = out.stdout.split()
    unit = 1 if sys.platform == 'darwin' else 1024  # macOS reports ru_maxrss in bytes, Linux in KiB
    return float(seconds), float(peak) * unit / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--rounds', type=int, default=15)
    rounds = parser.parse_args().rounds
    works = {name: functools.partial(measure, text) for name, text in _STATEMENTS.items()}
    medians(works, 1)  # the files are read from the disk only once
    found = medians(works, rounds)
    jax_seconds, jax_peak = found['import jax']
    print(f'medians of {rounds} fresh interpreters')
    print(f'{"":<20} {"seconds":>8} {"ratio":>6} {"peak MiB":>9} {"ratio":>6}')
    for name, (seconds, peak) in found.items():
        print(
            f'{name:<20} {seconds:>8.3f} {seconds / jax_seconds:>6.3f} {peak:>9.1f} '
            f'{peak / jax_peak:>6.3f}'
        )


if __name__ == '__main__':
    main()
