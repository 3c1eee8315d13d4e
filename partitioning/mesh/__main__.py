"""Shows the mesh of a machine, here or not: its axes, their networks and their hops.

python -m partitioning.mesh --topology=v5e:16x16 --num_partitions=8 --png=mesh.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jax.sharding import Mesh

from partitioning.hardware import Topology, describe_topology
from partitioning.mesh.aliases import create_mesh, default_mesh
from partitioning.mesh.rings import mesh_table
from partitioning.pictures.meshes import draw_mesh


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; 2 for settings that make no mesh."""
    flags = _parser().parse_args(arguments)
    try:
        _check_picture(flags.png)
        topology = _topology(flags)
        mesh = _mesh(flags, topology)
        wrap = topology.wrap if topology and topology.chip.platform == 'tpu' else None
        view = {'wrap': wrap, 'granule_size': flags.granule_size}
        print(f'{_machine(topology)}{_rings(topology)}')
        print(mesh_table(mesh, **view))
        if flags.png is not None:
            draw_mesh(mesh, flags.png, title=_machine(topology), **view)
            print(f'drawn into {flags.png}')
    except (ValueError, RuntimeError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    return 0


def _check_picture(png: str | None) -> None:
    if png is not None and (not png.endswith('.png') or not Path(png).parent.is_dir()):
        raise ValueError(f'--png={png}: name a file that ends in .png, in a folder that exists')


def _topology(flags: argparse.Namespace) -> Topology | None:
    if flags.topology is not None:
        return describe_topology(
            flags.topology,
            num_slices=flags.num_slices,
            wrap=flags.wrap,
            chips_per_host_bounds=flags.chips_per_host_bounds,
        )
    if flags.num_slices != 1 or flags.wrap is not None or flags.chips_per_host_bounds is not None:
        raise ValueError(
            '--num_slices, --wrap and --chips_per_host_bounds describe a --topology: this machine '
            'has its own'
        )
    return None


def _mesh(flags: argparse.Namespace, topology: Topology | None) -> Mesh:
    devices = topology.devices if topology else None
    deciding = {
        'num_partitions': flags.num_partitions,
        'model_parallel_submesh': flags.model_parallel_submesh,
        'ici_mesh_shape': flags.ici_mesh_shape,
        'dcn_mesh_shape': flags.dcn_mesh_shape,
    }
    if flags.axes is None:
        if all(value is None for value in deciding.values()):
            deciding['num_partitions'] = 1
        return default_mesh(
            **deciding,
            devices=devices,
            mesh_axis_names=flags.mesh_axis_names,
            granule_size=flags.granule_size,
        )
    deciding['mesh_axis_names'] = flags.mesh_axis_names
    beside = [f'--{name}' for name, value in deciding.items() if value is not None]
    if beside:
        raise ValueError(f'--axes decides everything that {", ".join(beside)} would: leave out')
    names, sizes = zip(*flags.axes, strict=True)
    return create_mesh(sizes, names, devices=devices, granule_size=flags.granule_size)


def _machine(topology: Topology | None) -> str:
    if topology is None:
        return 'this machine'
    slices = f'{topology.num_slices} slices of ' if topology.num_slices > 1 else ''
    return f'{slices}{topology.name}'


def _rings(topology: Topology | None) -> str:
    if topology is None or topology.chip.platform != 'tpu':
        return ''
    closed = [name for name, ring in zip('xyz', topology.wrap, strict=True) if ring]
    return f', links close to rings along {", ".join(closed)}' if closed else ', no closed rings'


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='python -m partitioning.mesh',
        description='Shows the mesh of a machine: axes, networks, hops between neighbours.',
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=(
            'examples:\n'
            '  --topology=v5e:16x16 --num_partitions=8\n'
            '  --topology=v5p:8x8x8 --num_slices=2 --axes=replica=2,data=-1,model=8\n'
            '  --topology=h100:16x8 --num_partitions=16 --png=mesh.png'
        ),
    )
    add = parser.add_argument
    add('--topology', help="a machine, as 'v5e:16x16' or 'h100:2x8'; by default this one")
    add('--num_slices', type=int, default=1, help='slices of that machine')
    add('--wrap', type=_booleans, help="count hops with closed x,y,z, as 'true,true,false'")
    add('--chips_per_host_bounds', type=_integers, help='chips of a TPU host, as 2,2,1')
    add('--num_partitions', type=int, help="size of the 'model' axis, by default 1")
    add('--model_parallel_submesh', type=_integers, help='its tile, as 2,2,1,1')
    add('--ici_mesh_shape', type=_integers, help='axis sizes within a slice, as 1,16,16')
    add('--dcn_mesh_shape', type=_integers, help='axis sizes over slices, as 2,1,1')
    add('--mesh_axis_names', type=_names, help='as data,model')
    add('--axes', type=_axes, help='any axes instead, as data=-1,fsdp=4,model=8')
    add('--granule_size', type=int, help='GPUs on one NVLink network, where more than a host')
    add('--png', help='also draw the mesh into this file')
    return parser


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(','))
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r} is not like 2,2,1') from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(','))


def _booleans(text: str) -> tuple[bool, ...]:
    values = {'true': True, 'false': False}
    try:
        return tuple(values[part.strip().lower()] for part in text.split(','))
    except KeyError:
        raise argparse.ArgumentTypeError(f'{text!r} is not like true,true,false') from None


def _axes(text: str) -> list[tuple[str, int]]:
    try:
        pairs = [part.split('=') for part in text.split(',')]
        return [(name.strip(), int(size)) for name, size in pairs]
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r} is not like data=-1,model=8') from None


if __name__ == '__main__':
    sys.exit(main())
