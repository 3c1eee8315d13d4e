"""A process that is interrupted, for test_signals.py.

python interrupted_process.py SCENARIO FOLDER
"""

import ctypes
import fcntl
import os
import signal
import sys
import termios
import threading
import time

from train.processes import signals

LINE = 'meshwright train mine'


def train_with(hook):
    """Trains 6 steps with a hook that runs after step 3."""

    def command():
        import jax

        jax.config.update('jax_num_cpu_devices', 8)

        from test_signals import config

        from train import train

        train(config(sys.argv[2], hooks=[lambda state, step, metrics: step == 3 and hook()]))
        return 0

    return command


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def hang_up():
    """Waits for the SIGHUP that the system sends when the parent closes the terminal."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the terminal of this session
    print('ready', flush=True)
    end = time.monotonic() + 120
    while signals.received() is None and time.monotonic() < end:
        time.sleep(0.01)


def block(*numbers):
    """Lets another thread get signals while this one can run no handler, as in a compiler.

    Each signal has arrived before the next one is sent: `os.kill` would not wait for this thread.
    """

    def command():
        mutex = ctypes.create_string_buffer(128)
        threading.Thread(target=lambda: [signal.raise_signal(n) for n in numbers]).start()
        while True:
            ctypes.CDLL(None).pthread_mutex_lock(mutex)  # the second time waits forever

    return command


def block_in_loop():
    """The same when there is a state to save, with a progress bar on the terminal."""
    from rich.progress import Progress

    signals.defer()
    with Progress() as progress:
        progress.add_task('train')
        return block(signal.SIGTERM, signal.SIGHUP)()


def end_a_child():
    """Ends a child, as a pool of workers does."""
    reader, writer = os.pipe()
    child = os.fork()
    while child == 0:
        os.write(writer, b'.')
        time.sleep(60)
    os.read(reader, 1)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM
    return 3 if signals.received() is None else 4


SCENARIOS = {
    'child': end_a_child,
    'pipe': train_with(terminate),
    'terminal': train_with(hang_up),
    'compiler': block(signal.SIGINT),
    'second': block_in_loop,
}

if __name__ == '__main__':
    signals.handle_until_exit()
    signals.SECONDS_TO_CLEAN_UP = 0.1
    signals.SECONDS_OF_ONE_REQUEST = 0.0

    from train.cli.interruption import run_until_signal

    sys.exit(run_until_signal(SCENARIOS[sys.argv[1]], LINE))
