"""Where a computer has no accelerator, the libraries of accelerators are not asked for devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from partitioning.hardware import devices

pytestmark = pytest.mark.core


@pytest.fixture
def plain(monkeypatch, tmp_path):
    """A root without accelerators, in which files can be made."""
    monkeypatch.setattr(sys, 'platform', 'linux')
    monkeypatch.setattr(devices, '_plugins', lambda: ['xla_cuda13'])

    def make(*files, environment=None):
        for file in files:
            name, _, content = file.partition('=')
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
        return devices.has_accelerator(str(tmp_path), environment or {})

    return make


PCI = 'sys/bus/pci/devices/0000:00:04.0'


@pytest.mark.parametrize(
    ('files', 'found'),
    [
        ((), False),
        (('dev/accel0',), True),
        (('dev/vfio/0',), True),
        (('dev/vfio/vfio',), False),
        (('dev/nvidia0',), True),
        (('dev/kfd',), True),
        ((f'{PCI}/vendor=0x1ae0', f'{PCI}/class=0x088000'), True),
        ((f'{PCI}/vendor=0x1ae0', f'{PCI}/class=0x020000'), False),
        ((f'{PCI}/vendor=0x8086', f'{PCI}/class=0x060000'), False),
    ],
)
def test_accelerators_are_found_by_their_files(plain, files, found):
    assert plain(*files) == found


def test_what_is_unknown_may_be_an_accelerator(plain, monkeypatch):
    assert plain(environment={'TPU_NAME': 'mine'})
    monkeypatch.setattr(devices, '_plugins', lambda: ['xla_cuda13', 'metal'])
    assert plain()
    monkeypatch.setattr(sys, 'platform', 'darwin')
    assert plain()


@pytest.mark.skipif(devices.has_accelerator(), reason='this computer may have an accelerator')
def test_a_command_prints_no_errors_of_libraries(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(('JAX', 'XLA', 'TPU'))}
    environment['PYTHONPATH'] = str(Path(__file__).parents[2])
    command = [sys.executable, '-m', 'train.cli', 'mesh']
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, '')
