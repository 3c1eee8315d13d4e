"""Devices by arithmetic are those that the compilers describe."""

import pytest
from described_machines import needs_cuda_plugin, needs_libtpu

from partitioning.hardware import describe_topology, drawing_devices, topology
from partitioning.hardware.devices import slice_bounds

FIELDS = ('id', 'process_index', 'platform', 'device_kind', 'core_on_chip', 'slice_index')
TPUS = {'v5e:1x1': 1, 'v5e:4x8': 1, 'v5p:4x4x4': 1, 'v4:2x2x4': 1, 'v3:4x4': 1, 'v6e:2x4': 2}
GPUS = {'h100:2x4': 2, 'a100:1x8': 1}


def facts(devices):
    return [
        (tuple(device.coords), *(getattr(device, name, None) for name in FIELDS))
        for device in devices
    ]


@pytest.mark.parametrize(
    ('name', 'slices'),
    [
        *(pytest.param(name, n, marks=needs_libtpu) for name, n in TPUS.items()),
        *(pytest.param(name, n, marks=needs_cuda_plugin) for name, n in GPUS.items()),
    ],
)
def test_drawn_devices_equal_described_ones(name, slices, monkeypatch):
    described = describe_topology(name, num_slices=slices)

    def missing(*arguments):
        raise RuntimeError('the compiler is not installed')

    monkeypatch.setattr(topology, '_tpu_devices', missing)
    monkeypatch.setattr(topology, '_cuda_devices', missing)
    with pytest.raises(RuntimeError, match='not installed'):
        describe_topology(name, num_slices=slices)
    with drawing_devices():
        drawn = describe_topology(name, num_slices=slices)
    assert facts(drawn.devices) == facts(described.devices)
    if described.chip.platform == 'tpu':  # a forecast names the machine by them
        assert slice_bounds(drawn.devices[-1]) == slice_bounds(described.devices[-1])
    assert (drawn.bounds, drawn.wrap, drawn.name) == (
        described.bounds,
        described.wrap,
        described.name,
    )
