"""Fuzzes every reader of files, guided by coverage, and lists what is not refused in one line.

  pip install atheris
  python benchmarks/fuzz.py [--readers gin,plans] [--minutes 20] [--folder build/fuzz]

`fuzz_readers.py` lists the readers. The fuzzer replaces one file of a folder that our own writers
have written. A reader may read the file or raise an error that `meshwright` explains in one line. A
reader may take 5 processor seconds and 512 MiB, and print no control characters. Anything else is a
finding: its input is kept in DIR/READER/findings, and fuzzing goes on. The command can be stopped
and started again: it continues until each reader has had its processor minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.campaigns import parse_names, peak_memory, reset_peak

NAMES = (
    *('gin', 'settings', 'config.json', 'safetensors', 'orbax', 't5x', 'tokenizers', 'texts'),
    *('records', 'plans', 'dumps', 'run', 'index', 'program', 'messages'),
)
PACKAGES = ('partitioning', 'meshwright', 'train')
MOST_SECONDS, MOST_GROWTH = 5.0, 512 << 20
VALUES = (
    None,
    True,
    0,
    -1,
    0.5,
    1e308,
    2**63,
    10**12,
    '',
    '/',
    '../a',
    '\x1b[2J',
    [],
    {},
    [[]],
    [0],
)
LONGEST = 128 << 10  # Larger files of a folder stay as they are.
SECONDS_BETWEEN_NOTES = 10.0


class Hang(BaseException):
    """An input that takes more than MOST_SECONDS of the processor."""


def raise_hang(signum: int, frame: FrameType | None) -> None:
    raise Hang


class Fuzzed:
    """One reader while it is fuzzed, and what has been found; `note` writes it to `folder`."""

    def __init__(self, name: str, folder: Path, seconds: float):
        from benchmarks.fuzz_readers import READERS
        from train.cli.command import explain

        self.reader, self.explain, self.folder = READERS[name], explain, folder
        self.work = Path(tempfile.mkdtemp())
        self.reader.write(self.work)
        found = sorted(p for p in self.work.rglob('*') if p.is_file())
        self.files = {p: p.read_bytes() for p in found if p.stat().st_size <= LONGEST}
        self.findings: dict[str, str] = {}
        self.executions, self.growth, self.slowest = 0, 0, 0.0
        self.started, self.until, self.noted = time.process_time(), seconds, 0.0
        signal.signal(signal.SIGPROF, raise_hang)

    def write_corpus(self) -> Path:
        """Writes the files as the first inputs, whose first byte says which file it is."""
        corpus = self.folder / 'corpus'
        corpus.mkdir(parents=True, exist_ok=True)
        for number, content in enumerate(self.files.values()):
            (corpus / f'seed-{number}').write_bytes(bytes([number % 256]) + content)
        return corpus

    def try_one(self, data: bytes) -> None:
        """Reads the folder with one file replaced by the input, and notes what is not allowed."""
        if not data:
            return
        path = list(self.files)[data[0] % len(self.files)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data[1:])
        before, began, output = reset_peak(), time.process_time(), io.StringIO()
        problem = ''
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
                self.reader.read(self.work, path)
                signal.setitimer(signal.ITIMER_PROF, 0)
        except BaseException as error:
            signal.setitimer(signal.ITIMER_PROF, 0)
            problem = self._judge(error)
        grown, taken = peak_memory() - before, time.process_time() - began
        if grown > MOST_GROWTH:
            problem = f'{grown >> 20} MiB {problem}'
        if not all(c.isprintable() or c in '\n\t' for c in output.getvalue()):
            problem = f'control characters {problem}'
        if problem:
            self._keep(problem, path, data)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.files[path])
        self.executions += 1
        self.growth, self.slowest = max(self.growth, grown), max(self.slowest, taken)
        if time.process_time() - self.noted > SECONDS_BETWEEN_NOTES:
            self.note()

    def _judge(self, error: BaseException) -> str:
        """What is wrong with an error, and where it is from; '' if users get it in one line."""
        if isinstance(error, Exception) and self.explain(error) is not None:
            return ''
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if any(f'/{p}/' in f.filename for p in PACKAGES)]
        last = (own or frames)[-1]
        place = '/'.join(Path(last.filename).parts[-3:])
        return f'{type(error).__name__} {place}:{last.lineno}'

    def _keep(self, problem: str, path: Path, data: bytes) -> None:
        if problem.lstrip('0123456789') in self.findings:
            return
        self.findings[problem.lstrip('0123456789')] = problem
        folder = self.folder / 'findings'
        folder.mkdir(exist_ok=True)
        name = ''.join(c if c.isalnum() else '-' for c in problem)
        (folder / f'{name}.input').write_bytes(data)
        with (folder / 'list.txt').open('a') as file:
            file.write(f'{problem} in {path.relative_to(self.work)}: {name}.input\n')

    def note(self) -> None:
        """Writes how much has been done, and ends the process when it is enough."""
        self.noted = time.process_time()
        done = {
            'seconds': self.noted - self.started,
            'executions': self.executions,
            'growth': self.growth,
            'slowest': self.slowest,
        }
        with (self.folder / 'log.jsonl').open('a') as file:
            file.write(json.dumps(done) + '\n')
        self.started, self.executions = self.noted, 0
        self.until -= done['seconds']
        if self.until <= 0:
            os._exit(0)


def change_json(tree: Any, rng: random.Random) -> Any:
    """JSON in which one value is removed, or replaced by an unusual one or another value."""
    places = []
    waiting = [tree]
    while waiting:
        one = waiting.pop()
        keys = (
            list(one) if isinstance(one, dict) else range(len(one) if isinstance(one, list) else 0)
        )
        places += [(one, key) for key in keys]
        waiting += [one[key] for key in keys]
    if not places:
        return rng.choice(VALUES)
    (holder, key), (other, from_key) = rng.choice(places), rng.choice(places)
    way = rng.randrange(4)
    if way == 0:
        del holder[key]
    elif way == 1 and isinstance(holder, dict):
        holder[str(from_key)] = holder.pop(key)
    else:
        holder[key] = rng.choice(VALUES) if way == 2 else copy.deepcopy(other[from_key])
    return tree


def change_words(text: bytes, rng: random.Random) -> bytes:
    """A text in which a few words are removed, or replaced by an unusual value or another word."""
    parts = re.split(rb'(\W+)', text)
    for _ in range(rng.randrange(1, 4)):
        values = [json.dumps(rng.choice(VALUES)).encode(), rng.choice(parts), b'']
        parts[rng.randrange(len(parts))] = rng.choice(values)
    return b''.join(parts)


def mutate(data: bytes, most: int, seed: int) -> bytes:
    """The next input: half of them keep the form of JSON or of words, so that more is read."""
    import atheris

    rng = random.Random(seed)
    if len(data) < 2 or rng.random() < 0.5:
        return atheris.Mutate(data, most)
    try:
        changed = json.dumps(change_json(json.loads(data[1:]), rng)).encode()
    except (ValueError, RecursionError):
        changed = change_words(data[1:], rng)
    return (data[:1] + changed)[:most]


def fuzz_here(name: str, folder: Path, seconds: float) -> None:
    """Fuzzes a reader in this process, which ends with it."""
    import atheris
    import jax

    jax.config.update('jax_num_cpu_devices', 2)
    with atheris.instrument_imports(include=[*PACKAGES, 'gin']):
        one = Fuzzed(name, folder, seconds)
        corpus = one.write_corpus()
        for number, content in enumerate(one.files.values()):  # Imports what is imported late.
            one.try_one(bytes([number % 256]) + content)
        options = [f'-artifact_prefix={folder}/findings/', f'-max_len={LONGEST}', '-timeout=120']
        limits = ['-rss_limit_mb=8192', '-verbosity=0', '-detect_leaks=0']
        atheris.Setup(
            [sys.argv[0], *options, *limits, str(corpus)], one.try_one, custom_mutator=mutate
        )
        atheris.Fuzz()


def totals(folder: Path) -> dict[str, Any]:
    """What has been done for a reader so far, in this and earlier calls."""
    log = folder / 'log.jsonl'
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    listed = folder / 'findings/list.txt'
    kept = (
        {line.partition(': ')[0] for line in listed.read_text().splitlines()}
        if (listed.exists())
        else set()
    )
    crashes = [
        p for p in folder.glob('findings/*-*') if p.name.startswith(('crash', 'timeout', 'oom'))
    ]
    return {
        'seconds': sum(one['seconds'] for one in lines),
        'executions': sum(one['executions'] for one in lines),
        'growth': max((one['growth'] for one in lines), default=0),
        'slowest': max((one['slowest'] for one in lines), default=0.0),
        'findings': sorted(kept) + sorted(p.name for p in crashes),
    }


def fuzz_reader(name: str, folder: Path, seconds: float) -> None:
    """Fuzzes a reader until it has had this much of the processor, also if its process dies."""
    (folder / 'findings').mkdir(parents=True, exist_ok=True)
    while (left := seconds - totals(folder)['seconds']) > 0:
        command = [sys.executable, __file__, '--one', name, str(folder), str(left)]
        before = totals(folder)
        with (folder / 'stderr').open('ab') as said:
            status = subprocess.run(command, stdout=said, stderr=said).returncode
        if totals(folder) == before:
            raise SystemExit(f'{name}: the process ends at once ({status}): see {folder}/stderr')


def main() -> int:
    if sys.argv[1:2] == ['--one']:
        name, folder, seconds = sys.argv[2:]
        fuzz_here(name, Path(folder), float(seconds))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--readers', help='separated by commas (all)')
    parser.add_argument('--minutes', type=float, default=20.0, help='of the processor, per reader')
    parser.add_argument('--folder', type=Path, default=Path('build/fuzz'))
    options = parser.parse_args()
    print('| reader | executions | minutes | slowest | growth | findings |')
    print('|---' * 6 + '|')
    found = []
    for name in parse_names(options.readers, NAMES, 'reader'):
        folder = options.folder.resolve() / name
        fuzz_reader(name, folder, options.minutes * 60)
        done = totals(folder)
        found += done['findings']
        minutes, growth = done['seconds'] / 60, done['growth'] >> 20
        print(
            f'| {name} | {done["executions"]:,} | {minutes:.1f} | {done["slowest"]:.2f} s '
            f'| {growth} MiB | {len(done["findings"])} |',
            flush=True,
        )
    print(*found, sep='\n')
    return bool(found)


if __name__ == '__main__':
    sys.exit(main())
