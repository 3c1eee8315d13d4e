"""Starts several processes at the same time, and collects their reports."""

import json
import multiprocessing
import multiprocessing.forkserver
import os
import sys
import time
import unittest.mock
from pathlib import Path

from train.processes.launching.attempts import reserved_port

HANG_SECONDS = 1200  # Far longer than any job takes; it only ends processes that hang.
context = multiprocessing.get_context('forkserver')


def start_server():
    """Starts the process whose copies all others are, so that everything is imported once."""
    context.set_forkserver_preload(['faulty_process'])
    with unittest.mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        multiprocessing.forkserver.ensure_running()


def run_worker(count, folder):
    """Runs `worker.main` in `count` processes, and returns what each reports.

    If one fails, the others are killed at once, because they may wait for it forever.
    """
    import worker

    paths = [report_path(folder, index) for index in range(count)]
    outputs = [path.with_suffix('.txt') for path in paths]
    start_server()
    with reserved_port() as port:
        processes = [
            context.Process(target=worker.main, args=(port, count, index, folder, outputs[index]))
            for index in range(count)
        ]
        for process in processes:
            process.start()
        deadline = time.time() + HANG_SECONDS
        while any(process.is_alive() for process in processes) and time.time() < deadline:
            if any(process.exitcode for process in processes):
                break
            time.sleep(0.02)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
    texts = [path.read_text()[-3000:] for path, code in zip(outputs, codes, strict=True) if code]
    assert codes == [0] * count, '\n'.join(texts)
    return [json.loads(path.read_text()) for path in paths]


def report_path(folder, index):
    """Returns the file of a worker's report. Its stdout also contains lines of the collectives."""
    return Path(folder) / f'report {index}.json'
