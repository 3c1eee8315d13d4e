"""Which server would hold which shard: the lightest one next, by the bytes of variables."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from jax.sharding import Mesh

from partitioning.rules import describe_axes, nearest


def place_shards(
    loads: Mapping[str, float], nbytes: int, num_shards: int
) -> tuple[tuple[str, ...], dict[str, float]]:
    """The servers of the shards of one variable, the lightest first, in turns if there are too few.

    Args:
      loads: bytes of each server so far; of two with the same load the first here goes first.
      nbytes: of the variable, of which each shard counts as an equal part, remainder or not.
      num_shards: in how many shards it is cut.

    Returns:
      The server of each shard, and the loads with them.
    """
    by_load = itertools.cycle(sorted(loads, key=loads.__getitem__))
    servers = tuple(itertools.islice(by_load, num_shards))
    return servers, {
        server: load + servers.count(server) * (nbytes / num_shards)
        for server, load in loads.items()
    }


def check_servers(servers: Any) -> tuple[str, ...]:
    """The names of servers.

    Raises:
      ValueError: none, a name that is no text, or one twice.
    """
    if isinstance(servers, str) or not isinstance(servers, Iterable):
        raise ValueError(f"servers {servers!r} must be a list of names, such as ['A', 'B']")
    names = tuple(servers)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f'servers {names} must be one name or more')
    if len(set(names)) < len(names):
        raise ValueError(f'servers {names} have a name twice')
    return names


def servers_of(mesh: Mesh) -> tuple[str, ...]:
    """The processes of a mesh as servers, where AutoDist would take the host CPU of each node."""
    processes = sorted({device.process_index for device in mesh.devices.flat})
    return tuple(f'process {process}' for process in processes)


def split_axis(mesh_axes: Mapping[str, int], mesh_axis: str | None = None) -> str:
    """The mesh axis that variables are split over.

    Args:
      mesh_axes: the size of each mesh axis.
      mesh_axis: the one to take; by default 'data', or where that is not there or of size 1 the
        only axis larger than 1.

    Raises:
      ValueError: no such axis, or several that could be it.
    """
    if mesh_axis is not None:
        if mesh_axis not in mesh_axes:
            raise ValueError(
                f'mesh_axis {mesh_axis!r} does not exist: the mesh is {describe_axes(mesh_axes)}.'
                f'{nearest(mesh_axis, mesh_axes)}'
            )
        return mesh_axis
    larger = [axis for axis, size in mesh_axes.items() if size > 1] or list(mesh_axes)[:1]
    if 'data' in larger:
        return 'data'
    if len(larger) != 1:
        raise ValueError(
            f'variables could be split over {" or ".join(map(repr, larger))} of the mesh '
            f"{describe_axes(mesh_axes)}: choose with mesh_axis='{larger[0]}'"
        )
    return larger[0]
