"""`meshwright check` of a script for a described machine."""

import json

import pytest
from described_machines import needs_libtpu

from train.cli import main

pytestmark = [needs_libtpu, pytest.mark.long]

SCRIPT = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((4, 2), ('data', 'model'), axis_types=(AxisType.Auto,) * 2)

def put(x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))

up = put(jnp.ones((512, 1024)), *UP)
down = put(jnp.ones((1024, 512)), 'model', 'data')

@jax.jit
def train_step(weights, x):
    def loss(weights):
        return jnp.mean((jax.nn.relu(x @ weights[0]) @ weights[1] - x) ** 2)
    value, slopes = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, slopes), value

weights = up, down
for _ in range(5):
    weights, value = train_step(weights, put(jnp.ones((64, 512)), 'data', None))
    print(float(value))
"""


def test_a_script_is_compared_by_its_largest_step(tmp_path, capsys):
    """The first weights are whole over data in place of in four parts: 2.1 MB / 2 and / 8."""
    declared = '[tool.meshwright.goldens.script]\nscript = "run.py"\ntopology = "v5e:2x4"\n'
    (tmp_path / 'pyproject.toml').write_text(declared)
    script = tmp_path / 'run.py'
    script.write_text(SCRIPT.replace('*UP', "'data', 'model'"))
    assert main(['check', '--update', f'--root={tmp_path}']) == 0
    script.write_text(
        '# moved\n\n' + SCRIPT.replace('*UP', "'data', 'model'").replace('up', 'first')
    )
    assert main(['check', f'--root={tmp_path}']) == 0
    script.write_text(SCRIPT.replace('*UP', "None, 'model'"))
    capsys.readouterr()
    assert main(['check', f'--root={tmp_path}', '--json']) == 1
    [program] = json.loads(capsys.readouterr().out)['programs']
    [layout] = [one for one in program['differences'] if one['kind'] == 'argument']
    assert "P('data', 'model'), 262.1 kB" in layout['before']
    assert "P(None, 'model'), 1.0 MB" in layout['after']
    assert any(
        one['kind'] == 'exchange' and 'run.py:' in one['line'] for one in program['differences']
    )
