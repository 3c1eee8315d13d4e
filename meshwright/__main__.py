"""`python -m meshwright` is the command `meshwright`, which the wheel installs."""

import sys
from importlib.metadata import entry_points

if __name__ == '__main__':
    commands = entry_points(group='console_scripts', name='meshwright')
    if not commands:
        sys.exit(
            'meshwright: the command is not installed; pip install meshwright, or run '
            'python -m train.cli in a clone'
        )
    sys.exit(next(iter(commands)).load()())
