"""Import: `import partitioning` beside `import jax`, in time and memory.

Run: python benchmarks/import_time.py [--rounds 15]

Each import runs in a fresh interpreter, the two take turns, and the ratio is that of the medians.
The time is that of the import statement; the memory is the process's peak after it.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

_CODE = """
import resource, time
start = time.perf_counter()
import {module}
seconds = time.perf_counter() - start
print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def measure(module: str) -> tuple[float, float]:
    """(seconds, peak MiB) of importing a module in a fresh interpreter."""
    code = _CODE.format(module=module)
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    seconds, peak = out.stdout.split()
    unit = 1 if sys.platform == 'darwin' else 1024  # ru_maxrss: bytes there, KiB elsewhere
    return float(seconds), float(peak) * unit / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--rounds', type=int, default=15)
    rounds = parser.parse_args().rounds
    modules = ('partitioning', 'jax')
    samples: dict[str, list[tuple[float, float]]] = {m: [] for m in modules}
    for round_ in range(rounds + 1):
        for module in modules if round_ % 2 else reversed(modules):
            samples[module].append(measure(module))
    times, peaks = (
        {m: statistics.median(s[i] for s in samples[m][1:]) for m in modules} for i in (0, 1)
    )
    print(f'medians of {rounds} fresh interpreters')
    print(f'{"":<14} {"seconds":>8} {"peak MiB":>9}')
    for module in modules:
        print(f'{module:<14} {times[module]:>8.3f} {peaks[module]:>9.1f}')
    time_ratio = times['partitioning'] / times['jax']
    print(f'{"ratio":<14} {time_ratio:>8.3f} {peaks["partitioning"] / peaks["jax"]:>9.3f}')


if __name__ == '__main__':
    main()
