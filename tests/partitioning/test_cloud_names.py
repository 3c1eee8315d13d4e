"""Names of clouds, with the shapes of the tables of Cloud TPU and Compute Engine."""

import pytest

from partitioning.hardware import parse_topology
from partitioning.hardware.cloud_names import from_cloud_name

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    'name, topology',
    [
        ('v2-8', 'v2:2x2'),
        ('v3-32', 'v3:4x4'),
        ('v4-8', 'v4:2x2x1'),
        ('v4-32', 'v4:2x2x4'),
        ('v4-512', 'v4:4x8x8'),
        ('v5litepod-1', 'v5e:1x1'),
        ('v5litepod-16', 'v5e:4x4'),
        ('v5litepod-256', 'v5e:16x16'),
        ('v5p-8', 'v5p:2x2x1'),
        ('v5p-16', 'v5p:2x2x2'),
        ('v5p-64', 'v5p:2x4x4'),
        ('v5p-128', 'v5p:4x4x4'),
        ('v5p-384', 'v5p:4x4x12'),
        ('v5p-1024', 'v5p:8x8x8'),
        ('v5p-2048', 'v5p:8x8x16'),
        ('v5p-4096', 'v5p:8x16x16'),
        ('v5p-12288', 'v5p:16x16x24'),
        ('v6e-8', 'v6e:2x4'),
        ('v6e-64', 'v6e:8x8'),
        ('tpu7x-128', 'tpu7x:4x4x4'),
        ('v5p-4x4x4', 'v5p:4x4x4'),
        ('a3-highgpu-8g', 'h100:1x8'),
        ('a3-ultragpu-8g', 'h200:1x8'),
        ('a4-highgpu-8g', 'b200:1x8'),
    ],
)
def test_names_of_clouds(name, topology):
    assert from_cloud_name(name) == topology
    chip, shape = parse_topology(name)
    assert f'{chip.name}:{"x".join(map(str, shape))}' == topology


@pytest.mark.parametrize('name', ['v5p:4x4x4', 'h100:1x8', 'v5p', 'v9-8', '', 'v5p-', 'v5p-0'])
def test_other_names_are_not_translated(name):
    assert from_cloud_name(name) is None


@pytest.mark.parametrize(
    'name, suggestion',
    [
        ('v5p-9', "counts 2 TensorCores per chip: write, for example, 'v5p-8'"),
        ('v5p-100', "'v5p-128'"),
        ('v5litepod-12', "counts chips: write, for example, 'v5litepod-16'"),
        ('v6e-512', "'v6e-256'"),
    ],
)
def test_sizes_that_no_cloud_offers(name, suggestion):
    with pytest.raises(ValueError, match=f'no machine {name!r} is offered') as caught:
        parse_topology(name)
    assert suggestion in str(caught.value) and '\n' not in str(caught.value)
