"""cuDNN on described GPUs, where programs are traced on machines that have none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
from jax.sharding import AbstractMesh, Mesh

from partitioning.hardware.chips import chip_of

# The cuDNN that described GPUs are taken to have, as jax counts its versions: 9.13.0.
DESCRIBED_VERSION = 91300


@contextlib.contextmanager
def described_cudnn(mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """Inside, functions that are traced for described GPUs may use the attention of cuDNN.

    `jax.nn.dot_product_attention` asks for the version of the cuDNN on this machine, although the
    program is for others, and has no public setting for it. Compiling needs no cuDNN. Outside of
    described GPUs, nothing changes.

    Args:
      mesh: the mesh for which functions are traced.
    """
    device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else mesh.abstract_device
    chip = None if device is None else chip_of(device.device_kind)
    if chip is None or chip.platform != 'gpu' or jax.default_backend() == 'gpu':
        yield
        return
    from jax._src.cudnn import fused_attention_stablehlo as kernels

    ask = kernels.check_cudnn_version
    kernels.check_cudnn_version = lambda: DESCRIBED_VERSION
    try:
        yield
    finally:
        kernels.check_cudnn_version = ask
