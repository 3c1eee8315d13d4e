"""Any train state -> its arrays: the path, role and axis names of each.

The rooms of this package, in the order in which a state passes through them:
  boxes: the objects that carry axis names, and the arrays inside them.
  path_names: axis names by regular expressions on paths, for models without names.
  naming: the arrays of a state that have names, and the parameters among them.
  follow: the parameter that each array of an optimizer belongs to.
  traversal: the one walk over a state, which uses all of the above.

In addition, `train_state` defines a train state like T5X's, `linen` defines corrected linen boxes,
and `conversion` translates between linen, nnx and T5X. The last two import flax, so they are loaded
on first use.
"""

from partitioning.state.boxes import (
    Parameter,
    Path,
    array_leaves,
    key_names,
    nbytes,
    path_str,
    shape_of,
    unbox,
)
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
