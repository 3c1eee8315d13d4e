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
import statistics
import subprocess
import sys

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
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in _STATEMENTS}
    for number in range(rounds + 1):
        names = list(_STATEMENTS)
        for name in names if number % 2 else reversed(names):
            samples[name].append(measure(_STATEMENTS[name]))
    times, peaks = (
        {n: statistics.median(s[i] for s in samples[n][1:]) for n in samples} for i in (0, 1)
    )
    print(f'medians of {rounds} fresh interpreters')
    print(f'{"":<20} {"seconds":>8} {"ratio":>6} {"peak MiB":>9} {"ratio":>6}')
    for name, seconds in times.items():
        time_ratio, peak_ratio = seconds / times['import jax'], peaks[name] / peaks['import jax']
        print(
            f'{name:<20} {seconds:>8.3f} {time_ratio:>6.3f} {peaks[name]:>9.1f} {peak_ratio:>6.3f}'
        )


if __name__ == '__main__':
    main()
