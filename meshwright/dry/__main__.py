"""`python -m meshwright.dry TOPOLOGY -- python train.py` is `meshwright dry`.

The command starts this module in a process of its own, in which nothing of the trainer is imported:
a script may have a module `train` of its own.
"""

import os
import sys

from meshwright.dry.command import main

if __name__ == '__main__':
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of the script, such as a loader's, may never end
