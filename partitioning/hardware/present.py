"""Which accelerators this computer has, without asking their libraries.

libtpu and jax's CUDA plugin print many lines where they are installed to describe machines, and
this computer has no such chip.
"""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_GOOGLE = '0x1ae0'  # as the vendor of a PCI device
# Variables that say that this computer has a TPU, or reaches one.
_TPU_VARIABLES = ('TPU_NAME', 'TPU_ACCELERATOR_TYPE', 'TPU_WORKER_HOSTNAMES', 'COLAB_TPU_ADDR')


def has_accelerator(root: str = '/', environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this computer may have an accelerator that jax can use. If in doubt, it may.

    Args:
      root: the root of the file system.
      environment: the variables of the environment.
    """
    if sys.platform != 'linux' or any(name in environment for name in _TPU_VARIABLES):
        return True
    devices = Path(root, 'dev')
    if any(any(devices.glob(one)) for one in ('accel*', 'vfio/[0-9]*', 'nvidia*', 'kfd', 'dxg')):
        return True
    for vendor in Path(root, 'sys/bus/pci/devices').glob('*/vendor'):
        try:
            if vendor.read_text().strip() == _GOOGLE and _is_tpu(vendor.parent):
                return True
        except OSError:
            return True
    return any(not name.startswith('xla_cuda') for name in _plugins())


def _is_tpu(device: Path) -> bool:
    """Whether a PCI device of Google is a TPU: an accelerator, and not a network card or a disk."""
    kind = (device / 'class').read_text().strip()
    return not kind.startswith(('0x01', '0x02'))


def _plugins() -> list[str]:
    """The plugins of jax that are installed, besides libtpu."""
    found = importlib.util.find_spec('jax_plugins')
    places = [] if found is None else list(found.submodule_search_locations or [])
    return [module.name for module in pkgutil.iter_modules(places)]


def use_cpu_without_accelerators() -> None:
    """Lets jax use the CPU only if it has nothing else, and the user has not chosen a platform.

    Call it before jax finds its devices.
    """
    import jax

    config: Any = jax.config  # whose types lack the setting in some versions of jax
    chosen = os.environ.get('JAX_PLATFORMS') or config.jax_platforms
    if not chosen and not has_accelerator():
        jax.config.update('jax_platforms', 'cpu')
