"""Starts JAX processes that work together, and hears what they say."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path


def say(value):
    """What a process has to say, as JSON: in a file, for the collectives speak on stdout, too."""
    Path(os.environ['SAID']).write_text(json.dumps(value))


def what_they_say(program, count, *args):
    """Runs a program in several processes at once.

    Args:
      program: Python code; its arguments are the port of process 0, the number of processes, its
        own, and `args`. What it has to say it gives to `processes.say`.
      count: of processes.
      args: more arguments.

    Returns:
      What each process has said.
    """
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    here = Path(__file__).parent
    modules = os.pathsep.join(map(str, (os.getcwd(), here, here.parent / 'partitioning')))
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f'{index}.json' for index in range(count)]
        processes = [
            subprocess.Popen(
                [sys.executable, '-c', program, *map(str, (port, count, index, *args))],
                env=os.environ | {'SAID': str(file), 'PYTHONPATH': modules},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index, file in enumerate(files)
        ]
        errors = []
        try:
            for process in processes:
                _, err = process.communicate(timeout=240)
                errors.append(err[-3000:] if process.returncode else '')
        finally:
            for process in processes:  # those that wait for one that has failed
                process.kill()
        assert not any(errors), '\n'.join(filter(None, errors))
        return [json.loads(file.read_text()) for file in files]
