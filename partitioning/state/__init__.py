"""Finds every array of a train state of any kind, with its path, its role and its logical axes.

The files of this package, in the order in which a state passes through them:
  boxes: the objects that carry axis names, and the arrays inside them.
  path_names: axis names by regular expressions on paths, for models without names.
  naming: the arrays of a state that have names, and the parameters among them.
  follow: the parameter that each array of an optimizer belongs to.
  traversal: the one walk over a state, which uses all of the above.

In addition, `structures` compares trees whose static fields differ. `train_state` defines a train
state like T5X's, `linen` defines corrected linen boxes, and `conversion` translates between linen,
nnx and T5X. The last two import flax, so they are loaded on first use.
"""

from partitioning.state.boxes import (
    KnownBoxes as KnownBoxes,
    Parameter as Parameter,
    Path as Path,
    array_leaves as array_leaves,
    key_names as key_names,
    nbytes as nbytes,
    path_str as path_str,
    shape_of as shape_of,
    unbox as unbox,
    with_boxes as with_boxes,
)
from partitioning.state.path_names import override_params_axes_names as override_params_axes_names
from partitioning.state.train_state import TrainState as TrainState
from partitioning.state.traversal import (
    Leaf as Leaf,
    Role as Role,
    get_logical_axes as get_logical_axes,
    says_itself as says_itself,
    walk as walk,
)
