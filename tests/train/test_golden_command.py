"""`meshwright forecast --golden`: what it writes, what it compares, and its exit status."""

import dataclasses
import sys

import gin
import pytest
from forecasts_by_hand import GIB, make_forecast

from train.cli import forecasting as command, main
from train.machine import devices as machine

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def _own_process(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
    monkeypatch.delenv('CI', raising=False)
    monkeypatch.delenv('XLA_FLAGS', raising=False)  # other compilers do not know conftest's flags
    monkeypatch.delenv('MESHWRIGHT_UPDATE_FORECASTS', raising=False)
    monkeypatch.setattr(sys, 'path', [*sys.path])
    monkeypatch.setattr(machine, 'use_virtual_devices', lambda count: None)
    yield
    gin.clear_config()


@pytest.fixture
def run(monkeypatch, capsys):
    """Returns a function (peak, flags) -> exit status and errors, without compiling."""

    def start(peak, *flags):
        memory = dataclasses.replace(make_forecast().memory, peak=peak)
        made = make_forecast(memory=memory)
        monkeypatch.setattr(command, '_forecast_all', lambda machines, options: ([made], []))
        arguments = ['forecast', 'pretrain', 'configs/models/8b.gin', '--topology=v5p:4x4x4']
        gin.clear_config()
        status = main([*arguments, *flags])
        return status, capsys.readouterr().err

    return start


def test_a_change_ends_with_one_until_it_is_agreed_to(run, tmp_path):
    file = tmp_path / 'golden/pretrain-8b.v5p-4x4x4.json'
    assert run(7 * GIB, '--golden=golden') == (0, f'wrote {file.relative_to(tmp_path)}\n')
    assert run(7 * GIB, '--golden=golden') == (0, '')
    status, error = run(8 * GIB, '--golden=golden')
    assert status == 1
    assert 'peak memory: 7.00 GiB -> 8.00 GiB (+14%, more than 1%)' in error
    assert run(8 * GIB, '--golden=golden', '--update')[0] == 0
    assert run(8 * GIB, '--golden=golden') == (0, '')


def test_a_step_that_does_not_fit_ends_with_one(run):
    assert run(100 * GIB, '--golden=golden')[0] == 1


def test_a_missing_file_ends_with_one_in_continuous_integration(run, monkeypatch, tmp_path):
    monkeypatch.setenv('CI', '1')
    status, error = run(7 * GIB, '--golden=golden')
    assert status == 1 and 'there is no golden file' in error
    assert not (tmp_path / 'golden').exists()


def test_an_update_needs_a_folder(run):
    status, error = run(7 * GIB, '--update')
    assert status == 2 and '--golden=DIR' in error and error.count('\n') == 1


def test_a_search_is_not_compared_with_golden_forecasts(run):
    status, error = run(7 * GIB, '--golden=golden', '--search')
    assert status == 2 and '--golden' in error and '--search' in error and error.count('\n') == 1
