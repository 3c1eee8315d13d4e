"""`python -m train.cli` runs `meshwright`. The launcher starts its processes with this command."""

import sys

from train.processes import signals

if __name__ == '__main__':
    signals.handle_until_exit()  # before anything that takes time is imported

    from train.processes.launching.attempts import end_with_launcher

    end_with_launcher()

    from train.processes.launching.spares import wait_as_spare

    wait_as_spare()
    end_with_launcher()  # a spare has only now the environment of its run

    from train.cli import main

    sys.exit(main())
