"""The command `python -m partitioning.mesh`, which shows the mesh of a machine."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from partitioning.command_line import OneLineParser
from partitioning.hardware import describe_topology
from partitioning.mesh.config import MeshConfig
from partitioning.mesh.order import mesh_table
from partitioning.pictures.mesh_drawing import draw_mesh, mesh_picture
from partitioning.untrusted_text import printable

_DRAWN = 1024  # the most devices that a picture on a terminal shows


def _reader(read: Callable[[str], Any], example: str = '') -> Callable[[str], Any]:
    """Returns a type of flags, whose errors have an example."""

    def parse(text: str) -> Any:
        try:
            return read(text)
        except (ValueError, KeyError) as error:
            message = f'{text!r} must be like {example}' if example else str(error)
            raise argparse.ArgumentTypeError(message) from None

    return parse


_names = _reader(lambda text: tuple(part.strip() for part in text.split(',')), 'data,model')
_integers = _reader(lambda text: tuple(map(int, text.split(','))), '2,2,1')
_booleans = _reader(
    lambda text: tuple({'true': True, 'false': False}[name.lower()] for name in _names(text)),
    'true,true,false',
)
_axes = _reader(MeshConfig.parse_axes)

# Settings of MeshConfig and of from_t5x; of MeshConfig alone; of from_t5x alone; and the others.
Flags = dict[str, tuple[Callable[[str], Any], str]]
_COMMON: Flags = {
    'topology': (str, "a machine, as 'v5e:16x16' or 'h100:2x8'; by default this one"),
    'num_slices': (int, 'the number of slices of --topology, by default 1'),
    'backend': (str, 'use the devices of this JAX backend'),
    'axis_types': (_names, 'auto or explicit, or one per axis; by default auto'),
    'granule_size': (int, 'the number of GPUs on one NVLink network'),
    'num_expert_partitions': (int, "the size of an 'expert' axis out of 'data'"),
}
_WITH_AXES: Flags = {
    'axes': (_axes, 'the axes, as data=-1,fsdp=4,model=8'),
    'dcn': (_axes, 'with --axes: the size of axes over slices, as data=2'),
    'slice_axis': (str, 'with --axes: the axis that spans the slices, as replica'),
}
_OF_T5X: Flags = {
    'num_partitions': (int, "the size of the 'model' axis, by default 1"),
    'model_parallel_submesh': (_integers, "the tile of 'model', as 2,2,1,1"),
    'ici_mesh_shape': (_integers, 'axis sizes within a slice, as 1,16,16'),
    'dcn_mesh_shape': (_integers, 'axis sizes over slices, as 2,1,1'),
    'mesh_axis_names': (_names, 'the names of these axes, as data,model'),
}
_VIEW: Flags = {
    'wrap': (_booleans, "count hops with closed x,y,z rings, as 'true,true,false'"),
    'chips_per_host_bounds': (_integers, 'the chips of a TPU host, as 2,2,1'),
    'png': (str, 'a file to draw the mesh into'),
}


def main(
    arguments: Sequence[str] | None = None,
    parser: argparse.ArgumentParser | None = None,
    with_picture: bool = False,
) -> int:
    """Runs the command and returns its exit status: 2 if the flags do not describe a mesh.

    By default, the arguments of this process are read, and the parser, which gets the flags, is
    the one of `python -m partitioning.mesh`. The picture shows as text where each device is.
    """
    parser = parser or OneLineParser('python -m partitioning.mesh')
    parser.description = 'Shows the mesh of a machine: axes, networks, hops between neighbours.'
    parser.epilog = (
        'examples:\n  --topology=v5e:16x16 --num_partitions=8 --png=mesh.png\n'
        '  --topology=v5p:8x8x8 --num_slices=2 --axes=data=-1,model=8 --dcn=data=2'
    )
    for name, (read, text) in (_COMMON | _WITH_AXES | _OF_T5X | _VIEW).items():
        names = ['--axes', '--mesh'] if name == 'axes' else [f'--{name}']
        parser.add_argument(*names, type=read, help=text)
    given = {k: v for k, v in vars(parser.parse_args(arguments)).items() if v is not None}
    try:
        mesh = _show(given)
        if with_picture and mesh.size <= _DRAWN:
            tty = sys.stdout.isatty()
            columns = shutil.get_terminal_size().columns if tty else None
            print(mesh_picture(mesh, color=tty, columns=columns))
    except (ValueError, RuntimeError, OSError) as error:
        print(f'error: {printable(str(error))}', file=sys.stderr)
        return 2
    return 0


def _show(given: dict[str, Any]) -> Mesh:
    """Prints the table of the mesh that the flags describe, draws it into a file, returns it."""
    png = given.get('png')
    if png is not None and (not png.endswith('.png') or not Path(png).parent.is_dir()):
        raise ValueError(f'--png={png} must be a path that ends in .png, in an existing folder')
    config, machine, rings = _config(given), 'this machine', ''
    view: dict[str, Any] = {'wrap': None, 'granule_size': given.get('granule_size')}
    options = {k: given[k] for k in ('num_slices', 'wrap', 'chips_per_host_bounds') if k in given}
    if 'topology' in given:
        topology = describe_topology(given['topology'], **options)
        slices = f'{topology.num_slices} slices of ' if topology.num_slices > 1 else ''
        machine = f'{slices}{topology.name}'
        config = dataclasses.replace(
            config, topology=None, num_slices=None, devices=topology.devices
        )
        if topology.chip.platform == 'tpu':
            view['wrap'] = topology.wrap
            closed = ', '.join(n for n, ring in zip('xyz', topology.wrap, strict=True) if ring)
            rings = f', links form {f"rings along {closed}" if closed else "no rings"}'
    elif options:
        raise ValueError('--wrap and --chips_per_host_bounds can only be used with --topology')
    mesh = config.build()
    print(f'{machine}{rings}')
    print(mesh_table(mesh, **view))
    if png is not None:
        draw_mesh(mesh, png, title=machine, **view)
        print(f'wrote {png}')
    return mesh


def _config(given: dict[str, Any]) -> MeshConfig:
    common, with_axes, of_t5x = (
        {name: given[name] for name in flags if name in given}
        for flags in (_COMMON, _WITH_AXES, _OF_T5X)
    )
    if 'axes' not in given:
        if with_axes:
            raise ValueError(f'{_flags(with_axes)} can only be used with --axes')
        if of_t5x.keys() <= {'mesh_axis_names'}:
            of_t5x['num_partitions'] = 1
        return MeshConfig.from_t5x(**of_t5x, **common)
    if of_t5x:
        raise ValueError(f'--axes already determines {_flags(of_t5x)}: remove one of them')
    return MeshConfig(**with_axes, **common)


def _flags(names: Iterable[str]) -> str:
    return ', '.join(f'--{name}' for name in names)
