"""Shows the mesh of a machine, here or described: its axes, their networks and their hops.

python -m partitioning.mesh --topology=v5e:16x16 --num_partitions=8 --png=mesh.png
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from partitioning.hardware import Topology, describe_topology
from partitioning.mesh.config import MeshConfig
from partitioning.mesh.rings import mesh_table
from partitioning.pictures.mesh_drawing import draw_mesh

# The flags that decide the axes as T5X does; --axes replaces all of them.
_T5X_FLAGS = (
    'num_partitions',
    'model_parallel_submesh',
    'ici_mesh_shape',
    'dcn_mesh_shape',
    'mesh_axis_names',
)
# The flags that belong to --axes.
_AXES_FLAGS = ('dcn', 'slice_axis', 'process_is_granule', 'order')
_COMMON_FLAGS = (
    *('topology', 'num_slices', 'backend', 'axis_types', 'granule_size'),
    'num_expert_partitions',
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
      The exit status: 0, or 2 if the flags do not describe a mesh.
    """
    flags = _parser().parse_args(arguments)
    try:
        _check_picture(flags.png)
        config = _config(flags)
        topology = _topology(flags)
        if topology is not None:
            config = dataclasses.replace(
                config, topology=None, num_slices=None, devices=topology.devices
            )
        mesh = config.build()
        wrap = topology.wrap if topology and topology.chip.platform == 'tpu' else None
        view = {'wrap': wrap, 'granule_size': flags.granule_size}
        print(f'{_machine(topology)}{_rings(topology)}')
        print(mesh_table(mesh, **view))
        if flags.png is not None:
            draw_mesh(mesh, flags.png, title=_machine(topology), **view)
            print(f'wrote {flags.png}')
    except (ValueError, RuntimeError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    return 0


def _check_picture(png: str | None) -> None:
    if png is not None and (not png.endswith('.png') or not Path(png).parent.is_dir()):
        raise ValueError(f'--png={png} must be a path that ends in .png, in an existing folder')


def _config(flags: argparse.Namespace) -> MeshConfig:
    common = {name: getattr(flags, name) for name in _COMMON_FLAGS}
    t5x = _given(flags, _T5X_FLAGS)
    own = _given(flags, _AXES_FLAGS)
    if flags.axes is None:
        if own:
            raise ValueError(f'{_listed(own)} can only be used with --axes')
        if t5x.keys() <= {'mesh_axis_names'}:
            t5x['num_partitions'] = 1
        return MeshConfig.from_t5x(**t5x, **common)
    if t5x:
        raise ValueError(f'--axes already determines {_listed(t5x)}: remove one of them')
    return MeshConfig(axes=flags.axes, **own, **common)


def _given(flags: argparse.Namespace, names: Sequence[str]) -> dict:
    return {name: getattr(flags, name) for name in names if getattr(flags, name) is not None}


def _listed(names: Sequence[str] | dict) -> str:
    return ', '.join(f'--{name}' for name in names)


def _topology(flags: argparse.Namespace) -> Topology | None:
    if flags.topology is not None:
        return describe_topology(
            flags.topology,
            num_slices=flags.num_slices or 1,
            wrap=flags.wrap,
            chips_per_host_bounds=flags.chips_per_host_bounds,
        )
    if flags.wrap is not None or flags.chips_per_host_bounds is not None:
        raise ValueError('--wrap and --chips_per_host_bounds can only be used with --topology')
    return None


def _machine(topology: Topology | None) -> str:
    if topology is None:
        return 'this machine'
    slices = f'{topology.num_slices} slices of ' if topology.num_slices > 1 else ''
    return f'{slices}{topology.name}'


def _rings(topology: Topology | None) -> str:
    if topology is None or topology.chip.platform != 'tpu':
        return ''
    closed = [name for name, ring in zip('xyz', topology.wrap, strict=True) if ring]
    return f', links form rings along {", ".join(closed)}' if closed else ', links form no rings'


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='python -m partitioning.mesh',
        description='Shows the mesh of a machine: axes, networks, hops between neighbours.',
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=(
            'examples:\n'
            '  --topology=v5e:16x16 --num_partitions=8\n'
            '  --topology=v5p:8x8x8 --num_slices=2 --axes=data=-1,model=8 --dcn=data=2\n'
            '  --topology=h100:16x8 --num_partitions=16 --png=mesh.png'
        ),
    )
    add = parser.add_argument
    add('--topology', help="a machine, as 'v5e:16x16' or 'h100:2x8'; by default this one")
    add('--num_slices', type=int, help='the number of slices of --topology, by default 1')
    add('--wrap', type=_booleans, help="count hops with closed x,y,z rings, as 'true,true,false'")
    add('--chips_per_host_bounds', type=_integers, help='the chips of a TPU host, as 2,2,1')
    add('--backend', help='use the devices of this JAX backend')
    add('--axes', type=_axes, help='the axes, as data=-1,fsdp=4,model=8')
    add('--dcn', type=_axes, help='with --axes: the size of axes over slices, as data=2')
    add('--slice_axis', help='with --axes: the axis that spans the slices, as replica')
    add('--process_is_granule', type=_boolean, help='with --axes: whether --dcn counts processes')
    add('--order', help="with --axes: the order of devices, 'best' or 't5x'")
    add('--num_partitions', type=int, help="the size of the 'model' axis, by default 1")
    add('--model_parallel_submesh', type=_integers, help="the tile of 'model', as 2,2,1,1")
    add('--ici_mesh_shape', type=_integers, help='axis sizes within a slice, as 1,16,16')
    add('--dcn_mesh_shape', type=_integers, help='axis sizes over slices, as 2,1,1')
    add('--mesh_axis_names', type=_names, help='the names of these axes, as data,model')
    add('--num_expert_partitions', type=int, help="the size of an 'expert' axis out of 'data'")
    add('--axis_types', type=_names, default=('auto',), help='auto or explicit, or one per axis')
    add('--granule_size', type=int, help='the number of GPUs on one NVLink network')
    add('--png', help='a file to draw the mesh into')
    return parser


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(','))
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r} must be like 2,2,1') from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(','))


def _boolean(text: str) -> bool:
    return _booleans(text)[0]


def _booleans(text: str) -> tuple[bool, ...]:
    values = {'true': True, 'false': False}
    try:
        return tuple(values[part.strip().lower()] for part in text.split(','))
    except KeyError:
        raise argparse.ArgumentTypeError(f'{text!r} must be like true,true,false') from None


def _axes(text: str) -> dict[str, int]:
    try:
        return MeshConfig.parse_axes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == '__main__':
    sys.exit(main())
