"""`python -m train` is `meshwright train`."""

import sys

from train.cli.training import train

if __name__ == '__main__':
    sys.exit(train(sys.argv[1:], 'python -m train'))
