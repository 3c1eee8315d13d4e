"""Any train state -> the logical axes of its leaves -> their layouts.

`boxes`: what carries names; `path_names`: names by path; `naming`: what has names; `follow`:
what an optimizer keeps; `walk`: all of a state in one walk; `resolved`: the rules applied;
`train_state`: a state in T5X's manner.
"""

from partitioning.state.boxes import (
    Path,
    array_leaves,
    key_names,
    nbytes,
    path_str,
    shape_of,
    unbox,
)
from partitioning.state.follow import Parameter
from partitioning.state.path_names import PathRules, check_path_rules, override_params_axes_names
from partitioning.state.train_state import TrainState
from partitioning.state.traversal import Leaf, Role, get_logical_axes, walk

__all__ = [
    'Leaf',
    'Parameter',
    'Path',
    'PathRules',
    'Role',
    'TrainState',
    'array_leaves',
    'check_path_rules',
    'get_logical_axes',
    'key_names',
    'nbytes',
    'override_params_axes_names',
    'path_str',
    'shape_of',
    'unbox',
    'walk',
]
