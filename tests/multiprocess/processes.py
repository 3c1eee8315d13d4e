"""Starts JAX processes that work together, and hears what they say."""

import json
import socket
import subprocess
import sys


def what_they_say(program, count, *args):
    """Runs a program in several processes at once.

    Args:
      program: Python code; its arguments are the port of process 0, the number of processes, its
        own, and `args`. It prints one JSON object in a line.
      count: of processes.
      args: more arguments.

    Returns:
      The object of each process.
    """
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, '-c', program, *map(str, (port, count, index, *args))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    said, errors = [], []
    try:
        for process in processes:
            out, err = process.communicate(timeout=240)
            errors.append(err[-3000:] if process.returncode else '')
            # The collectives speak on stdout, too.
            said += [json.loads(line) for line in out.splitlines() if line.startswith('{')]
    finally:
        for process in processes:  # those that wait for one that has failed
            process.kill()
    assert not any(errors), '\n'.join(filter(None, errors))
    assert len(said) == count
    return said
