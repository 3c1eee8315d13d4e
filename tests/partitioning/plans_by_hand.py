"""A small plan, the file that it makes, and random plans."""

import re

import jax
import numpy as np
from hypothesis import strategies as st

from partitioning import AxisRules, PjitPartitioner, Plan, ResolvedDimension, create_mesh
from partitioning.plan import make_row
from partitioning.plan.plan_file import from_json

MESH = create_mesh((4, 2), ('data', 'model'))
TREE = {
    'fc1': {'bias': np.zeros(64, 'float32'), 'kernel': np.zeros((16, 64), 'float32')},
    'fc2': {'bias': np.zeros(16, 'float32'), 'kernel': np.zeros((64, 16), 'float32')},
}
NAMES = {'fc1/kernel': ('embed', 'mlp'), 'fc2/kernel': ('rows', None)}
RULES = [('embed', None), ('mlp', 'model'), ('rows', ('model', 'data'))]
FILE = """{"format": "meshwright plan 2",
 "mesh": {"data": 4, "model": 2},
 "rows": [
  {"path": "fc1/bias", "shape": [64], "dtype": "float32", "role": "parameters", \
"dimensions": [{"name": null, "axes": null, "reason": "no logical name"}], \
"shard_shape": [64], "bytes_total": 256, "bytes_per_device": 256},
  {"path": "fc1/kernel", "shape": [16, 64], "dtype": "float32", "role": "parameters", \
"dimensions": [{"name": "embed", "axes": null, "reason": "a rule replicates it", \
"rule": ["embed", null]}, {"name": "mlp", "axes": "model", "reason": "a rule shards it", \
"rule": ["mlp", "model"]}], "shard_shape": [16, 32], "bytes_total": 4096, \
"bytes_per_device": 2048},
  {"path": "fc2/bias", "shape": [16], "dtype": "float32", "role": "parameters", \
"dimensions": [{"name": null, "axes": null, "reason": "no logical name"}], \
"shard_shape": [16], "bytes_total": 64, "bytes_per_device": 64},
  {"path": "fc2/kernel", "shape": [64, 16], "dtype": "float32", "role": "parameters", \
"dimensions": [{"name": "rows", "axes": ["model", "data"], "reason": "a rule shards it", \
"rule": ["rows", ["model", "data"]]}, {"name": null, "axes": null, "reason": "no logical name"}], \
"shard_shape": [8, 16], "bytes_total": 4096, "bytes_per_device": 512}
 ]}
"""


def planned(tree=TREE, names=NAMES, rules=RULES, mesh=MESH, **policies):
    """The plan of a tree whose arrays have names by path; arrays without an entry have none."""
    paths = []
    for keys, x in jax.tree_util.tree_leaves_with_path(tree):
        path = jax.tree_util.keystr(keys, simple=True, separator='/')
        paths.append((re.escape(path), names.get(path, (None,) * np.ndim(x))))
    partitioner = PjitPartitioner(mesh, AxisRules(rules, names=paths, **policies))
    return partitioner.plan(tree)


def read(text):
    """The plan of the text of a file."""
    rows, mesh, _ = from_json(text)
    return Plan(mesh, rows)


AXES = ['data', 'model', 'one']
TEXTS = st.text('ab/."\\é\n', min_size=1, max_size=4)


@st.composite
def plans(draw):
    """A plan of random arrays on a random mesh."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 8]), min_size=1, max_size=3))
    mesh = dict(zip(draw(st.permutations(AXES)), sizes, strict=False))
    rows = []
    for path in draw(st.lists(TEXTS, max_size=4, unique=True)):
        free, shape, dimensions = [*mesh], [], []
        for _ in range(draw(st.integers(0, 3))):
            axes = tuple(free.pop() for _ in range(draw(st.integers(0, len(free)))))
            num_shards = int(np.prod([mesh[a] for a in axes]))
            pad = draw(st.booleans()) and num_shards > 1
            shape.append(draw(st.integers(0, 3)) * num_shards + pad)
            wanted = None if not axes else axes[0] if len(axes) == 1 else axes
            dimensions.append(
                ResolvedDimension(
                    name=draw(st.none() | TEXTS),
                    mesh_axes=None if pad else wanted,
                    rule=draw(st.none() | st.just(('a', ('data', 'model')))),
                    lost=draw(st.sampled_from([(), ((('b', None), 'why'),)])),
                    reason=draw(TEXTS),
                    policy='pad' if pad else None,
                    wanted=wanted,
                    fits=(num_shards,) if pad else (),
                )
            )
        dtype = draw(st.sampled_from(['float32', 'int8', 'bool']))
        array = jax.ShapeDtypeStruct(tuple(shape), dtype)
        role = draw(st.sampled_from(['parameters', 'optimizer', 'other']))
        rows.append(make_row(path, array, mesh, dimensions, role))
    return Plan(mesh, tuple(rows))
