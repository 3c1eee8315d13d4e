"""The machine that a function is traced for."""

from __future__ import annotations

import jax


def device_kind() -> str:
    """Returns the `device_kind` of the mesh that is set, or of this process without a mesh.

    The mesh knows it also for described devices, where this process has others. A mesh that was
    made without devices, an `AbstractMesh`, counts as this process's devices.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return str(jax.devices()[0].device_kind if device is None else device.device_kind)


def platform() -> str:
    """Returns 'tpu', 'gpu' or 'cpu': the platform of `device_kind`."""
    kind = device_kind()
    return 'tpu' if kind.startswith('TPU') else 'cpu' if kind == 'cpu' else 'gpu'
