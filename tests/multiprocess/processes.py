"""Starts several processes at the same time, and collects their reports."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from train.processes.launching.children import reserved_port

HERE = Path(__file__).parent
HANG_SECONDS = 1200  # Far longer than any job takes; it only ends processes that hang.


def run_together(commands, **environment):
    """Runs commands at the same time, and returns what each writes to stdout.

    If one fails, the others are killed at once, because they may wait for it forever.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as files:
        paths = [
            [Path(folder, f'{i}.{name}') for name in ('out', 'err')] for i in range(len(commands))
        ]
        processes = []
        try:
            for command, (out, err) in zip(commands, paths, strict=True):
                stdout, stderr = (files.enter_context(path.open('w')) for path in (out, err))
                process = subprocess.Popen(
                    command, env=os.environ | environment, stdout=stdout, stderr=stderr
                )
                processes.append(process)
            with ThreadPoolExecutor(len(processes)) as pool:
                futures = [pool.submit(_wait_for_success, process) for process in processes]
                done, pending = wait(futures, HANG_SECONDS, FIRST_EXCEPTION)
                failed = [i for i, f in enumerate(futures) if f in done and f.exception()]
                _kill(processes)
        finally:
            _kill(processes)
        assert not failed, '\n'.join(paths[i][1].read_text()[-3000:] for i in failed)
        assert not pending, f'{len(pending)} processes did not end within {HANG_SECONDS} seconds'
        return [out.read_text() for out, _ in paths]


def run_worker(count, folder):
    """Runs worker.py in `count` processes, and returns what each reports."""
    root = HERE.parents[1]
    folders = (HERE, HERE.parent / 'partitioning', HERE.parent / 'train')
    modules = os.pathsep.join(map(str, (root, *folders)))
    with reserved_port() as port:
        run_together(
            [
                [sys.executable, str(HERE / 'worker.py'), *map(str, (port, count, index, folder))]
                for index in range(count)
            ],
            PYTHONPATH=modules,
        )
    return [json.loads(report_path(folder, index).read_text()) for index in range(count)]


def report_path(folder, index):
    """Returns the file of a worker's report. Its stdout also contains lines of the collectives."""
    return Path(folder) / f'report {index}.json'


def _wait_for_success(process):
    if process.wait() != 0:
        raise RuntimeError


def _kill(processes):
    for process in processes:
        process.kill()
        process.wait()
