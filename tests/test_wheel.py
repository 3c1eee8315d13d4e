"""What a wheel contains. `make wheel-check` installs one and runs it."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope='module')
def wheel():
    wheel = pytest.importorskip('hatchling.builders.wheel', reason='a wheel is built by hatchling')
    return wheel.WheelBuilder(str(ROOT))


def test_a_wheel_has_all_modules_and_configs_and_nothing_else(wheel):
    packages = [
        p for name in ('train', 'meshwright', 'partitioning') for p in (ROOT / name).rglob('*.*')
    ]
    code = {str(p.relative_to(ROOT)) for p in packages if '__pycache__' not in p.parts}
    configs = {f'train/{p.relative_to(ROOT)}' for p in (ROOT / 'configs').rglob('*') if p.is_file()}
    assert 'train/configs/runs/quickstart.gin' in configs
    files = {file.distribution_path for file in wheel.recurse_included_files()}
    assert files == code | configs


def test_the_command_is_an_entry_point(wheel):
    module, _, function = wheel.metadata.core.scripts['meshwright'].partition(':')
    assert callable(getattr(importlib.import_module(module), function))
