"""`python -m partitioning.mesh`: its output, its pictures and its errors."""

import itertools
import re

import numpy as np
import pytest
from mock_devices import gpus, tpu_slices, tpus

from partitioning import create_mesh, default_mesh
from partitioning.pictures.mesh_command import main
from partitioning.pictures.mesh_drawing import draw_mesh, mesh_picture

V5E_16X16 = """\
v5e:16x16, links form rings along x, y
256 TPU v5 lite devices, 64 processes of 4
axis   size  network  mean hops  worst hops
data     32  ICI           2.25           4
model     8  ICI           1.00           1
"""
HERE = """\
this machine
8 CPU devices, 1 process
axis   size  network  mean hops  worst hops
data      4  memory           -           -
model     2  memory           -           -
"""


def run(capsys, *flags):
    status = main(list(flags))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_this_machine(capsys):
    assert run(capsys, '--num_partitions=2') == (0, HERE, '')


def test_a_machine_that_is_not_here_as_the_readme_shows_it(capsys):
    pytest.importorskip('libtpu', reason='describing TPUs needs libtpu')
    flags = ('--topology=v5e:16x16', '--num_partitions=8')
    assert run(capsys, *flags) == (0, V5E_16X16, '')


def test_the_settings_of_a_config_are_flags(capsys):
    pytest.importorskip('libtpu', reason='describing TPUs needs libtpu')
    machine = ('--topology=v5e:4x4', '--num_slices=2')
    status, out, _ = run(capsys, *machine, '--axes=data=-1,model=4', '--dcn=data=2')
    assert status == 0
    assert [line.split()[:3] for line in out.splitlines()[3:]] == [
        ['data', '8', 'ICI'],
        ['model', '4', 'ICI'],
    ]
    status, out, _ = run(capsys, *machine, '--axes=data=-1,model=4', '--slice_axis=pod')
    assert out.splitlines()[3].split()[:3] == ['pod', '2', 'DCN']
    status, _, err = run(capsys, '--num_partitions=2', '--dcn=data=2')
    assert status == 2 and '--dcn' in err and '--axes' in err


def test_without_settings_everything_is_data(capsys):
    status, out, _ = run(capsys)
    assert status == 0
    assert out.splitlines()[-2:] == [
        'data      8  memory           -           -',
        'model     1  -                -           -',
    ]


def test_a_picture(capsys, tmp_path):
    status, out, _ = run(capsys, '--axes=data=4,model=2', f'--png={tmp_path}/mesh.png')
    assert status == 0
    assert out.endswith(f'wrote {tmp_path}/mesh.png\n')
    assert (tmp_path / 'mesh.png').read_bytes().startswith(b'\x89PNG\r\n')


@pytest.mark.parametrize(
    'flags, message',
    [
        (['--num_partitions=3'], 'num_partitions=3 does not divide the 8 devices'),
        (['--topology=v7x:4x4x4'], "unknown topology 'v7x:4x4x4'"),
        (['--num_slices=2'], 'num_slices=2 needs topology'),
        (['--axes=data=4,model=3'], "the nearest that fits: {'data': 4, 'model': 2}"),
        (['--axes=data=8', '--num_partitions=2'], '--axes already determines --num_partitions'),
        (['--ici_mesh_shape=1,4,2'], 'set both or neither'),
        (['--png=/nowhere/mesh.png'], 'in an existing folder'),
        (['--png=mesh'], 'ends in .png'),
        (['--png='], 'ends in .png'),
    ],
)
def test_errors_are_one_line(capsys, flags, message):
    status, _, err = run(capsys, *flags)
    assert status == 2
    assert err.startswith('error: ') and err.count('\n') == 1
    assert message in err


@pytest.mark.parametrize(
    'flag, example',
    [
        ('--axes=data', 'data=-1,model=8'),
        ('--wrap=yes', 'true,true,false'),
        ('--ici_mesh_shape=a', '2,2,1'),
    ],
)
def test_malformed_flags_get_an_example(capsys, flag, example):
    with pytest.raises(SystemExit):
        main([flag])
    assert f'must be like {example}' in capsys.readouterr().err


def test_a_picture_as_text():
    # Chips at (x, y) of two planes, as the coordinates of the devices of the mesh say.
    mesh = default_mesh(2, devices=tpus((2, 2, 2), 'TPU v5'))
    at = {device.coords: place for place, device in np.ndenumerate(mesh.devices)}
    label = {coords: f' {data}.{model} ' for coords, (data, model) in at.items()}
    title, planes, *rows = mesh_picture(mesh).splitlines()
    assert title.endswith('data.model:')
    assert planes.split() == ['z', '0', 'z', '1']
    assert rows == [
        '  '.join(label[0, y, z] + label[1, y, z] for z in range(2)).rstrip() for y in range(2)
    ]


def pixels(path):
    from matplotlib.image import imread

    return imread(path)


@pytest.mark.parametrize(
    'mesh',
    [
        pytest.param(default_mesh(4, devices=tpus((4, 4, 1), 'TPU v3', cores=2)), id='two cores'),
        pytest.param(default_mesh(8, devices=tpus((2, 2, 16), 'TPU v5')), id='many planes'),
        pytest.param(default_mesh(4, devices=tpu_slices(2, (2, 2, 2), 'TPU v4')), id='slices'),
        pytest.param(default_mesh(2, devices=gpus(8, 4)), id='GPU hosts'),
        pytest.param(create_mesh((1, 1), ('data', 'model'), devices=gpus(1, 1)), id='one'),
    ],
)
def test_every_machine_can_be_drawn(mesh, tmp_path):
    # Every device is once in the text, and the colors are around the same text.
    labels = re.sub(r'(slice|z) \d+,?', '', mesh_picture(mesh).partition('\n')[2]).split()
    several = [size for size in mesh.devices.shape if size > 1] or [1]
    positions = itertools.product(*map(range, several))
    assert sorted(labels) == sorted('.'.join(map(str, place)) for place in positions)
    lines = re.sub(r'\033\[[\d;]*m', '', mesh_picture(mesh, color=True)).splitlines()
    assert [line.rstrip() for line in lines] == mesh_picture(mesh).splitlines()
    # On a narrow terminal, planes that do not fit next to each other are below each other.
    narrow = mesh_picture(mesh, columns=48)
    assert sorted(re.sub(r'(slice|z) \d+,?', '', narrow.partition('\n')[2]).split()) == sorted(
        labels
    )
    assert max(map(len, narrow.splitlines())) <= 48
    pytest.importorskip('matplotlib', reason='pictures need matplotlib')
    draw_mesh(mesh, tmp_path / 'mesh.png', title='a machine')
    picture = pixels(tmp_path / 'mesh.png')[..., :3]
    assert min(picture.shape[:2]) > 100
    # The colours at both ends of the scale are there, so the page is not empty.
    assert (np.abs(picture - [0.267, 0.005, 0.329]).max(axis=-1) < 0.02).mean() > 0.01
    if mesh.size > 1:
        assert (np.abs(picture - [0.993, 0.906, 0.144]).max(axis=-1) < 0.02).mean() > 0.01


def test_colours_are_positions(tmp_path):
    pytest.importorskip('matplotlib', reason='pictures need matplotlib')
    # Four columns of positions 0 to 3 on the only axis of more than one device.
    mesh = create_mesh((1, 4), ('data', 'model'), devices=gpus(4, 1))
    draw_mesh(mesh, tmp_path / 'mesh.png')
    picture = pixels(tmp_path / 'mesh.png')[..., :3]
    height, width = picture.shape[:2]
    row = picture[int(height * 0.35)]
    violet = np.abs(row - [0.267, 0.005, 0.329]).max(axis=-1) < 0.02
    yellow = np.abs(row - [0.993, 0.906, 0.144]).max(axis=-1) < 0.02
    assert violet[: width // 4].mean() > 0.5 and not violet[width // 2 :].any()
    assert yellow[-width // 4 :].mean() > 0.5 and not yellow[: width // 2].any()
