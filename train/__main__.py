"""`python -m train` is `meshwright train`."""

import sys

from train.processes import signals

if __name__ == '__main__':
    signals.handle_until_exit()  # before anything that takes time is imported

    from train.cli import run_module

    sys.exit(run_module('train', 'training.train', sys.argv[1:]))
