"""The time of one exchange of data, by its kind and the links between the devices."""

from __future__ import annotations

from meshwright.program.collectives import Collective
from meshwright.time.links import Links, Machine
from partitioning.hardware import Chip

_EVERYONE_TO_EVERYONE = ('all-to-all', 'ragged-all-to-all')
# Where no share of the data centre network is published: a host of four chips has two network
# cards of 100 Gbit/s.
_USUAL_SHARE = 6.25e9


def links_of(collective: Collective, machine: Machine) -> Links:
    """The links between the devices of a collective.

    Between slices, each device exchanges data with those at its place in the others.
    """
    if collective.network == 'dcn':
        return Links(size=collective.group_size, granules=collective.group_size)
    if collective.axes:
        links = machine.links_along(collective.axes)
        if links.size == collective.group_size or collective.kind == 'collective-permute':
            return links
    return machine.links_of_size(collective.group_size)


def time_exchange(
    collective: Collective,
    links: Links,
    chip: Chip,
    *,
    network_bandwidth: float | None = None,
    efficiency: float = 1.0,
) -> float:
    """The seconds that one execution of a collective takes by its bytes, without latency.

    Args:
      collective: the collective.
      links: the links between its devices, from `links_of`.
      chip: the chip.
      network_bandwidth: a chip's share of the network between slices or hosts, in bytes/s.
      efficiency: the share of the bandwidth of links that collectives reach.
    """
    share = (network_bandwidth or _USUAL_SHARE) / chip.devices
    sent = collective.wire_bytes
    if collective.network == 'dcn':
        return sent / (share * efficiency)
    if chip.platform == 'gpu':
        fast = chip.ici_links * chip.ici_link_bandwidth
        seconds = sent / fast
        if links.granules > 1:
            # The ring passes through a host once per GPU of the group, over different adapters.
            alone = collective.kind in (*_EVERYONE_TO_EVERYONE, 'collective-permute')
            seconds = max(seconds, sent / (share * (1 if alone else links.per_granule)))
        return seconds / efficiency
    link = chip.ici_link_bandwidth * efficiency
    if not links.dimensions:  # the cores of one chip exchange data in its memory
        return sent / chip.hbm_bandwidth
    if collective.kind == 'collective-permute':
        return sent * links.cores / link
    seconds = sent / (links.lanes * link)
    if collective.kind in _EVERYONE_TO_EVERYONE:
        # Half of the data crosses the middle of every dimension.
        for dimension in links.dimensions:
            across = 4 * dimension.lanes * link
            seconds = max(seconds, sent * links.cores * dimension.size / across)
    return seconds
