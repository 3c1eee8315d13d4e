"""How long the parts of a step would take at the peak rates of the chip and its links."""

from __future__ import annotations

import dataclasses

from meshwright.program.collectives import Collective
from meshwright.time.layers import Product
from meshwright.time.links import Dimension, Links, Machine
from meshwright.time.work import KernelWork, Work
from partitioning.hardware import CHIPS, Chip


@dataclasses.dataclass(kw_only=True)
class ExchangeLoad:
    """The exchanges of one kind over the same mesh axes.

    Attributes:
      name: what they are, for people: 'all-gather over fsdp (ICI)'.
      slow: whether they cross the network between slices or hosts.
      seconds: their time at the peak rate of the links.
      count: the number of executions in one step whose start nothing is known to hide.
      phases: the phases of their rings between slices or hosts, in all executions.
      hops: the number of links that data passes one after another, in all executions.
      covered: the seconds of products at the peak rate that the program computes meanwhile, at most
        as long as each exchange, where its schedule is known.
    """

    name: str
    slow: bool
    seconds: float = 0.0
    count: int = 0
    phases: int = 0
    hops: int = 0
    covered: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loads:
    """The parts of a step in seconds at peak rates, without anything that hides or delays them.

    Attributes:
      chip: the name of the chip.
      products: matrix products by their FLOPs, padded to the matrix units of the chip, at the
        rate of their types.
      product_memory: the bytes of their operands and results.
      estimated_products: matrix products by the compiler's estimate, or None.
      memory: other operations by their bytes.
      estimated_others: other operations by the compiler's estimate, or None.
      kernels: hand-written kernels by their FLOPs.
      kernel_memory: the same by their bytes.
      exchanges: the exchanges with other devices.
      host_bytes: the bytes that are copied to and from the memory of the host.
      num_separate: the number of TPU slices, or of GPUs, each with a speed of its own.
      num_processes: the number of hosts.
    """

    chip: str
    products: float
    product_memory: float
    estimated_products: float | None
    memory: float
    estimated_others: float | None
    kernels: float
    kernel_memory: float
    exchanges: tuple[ExchangeLoad, ...]
    host_bytes: float
    num_separate: int
    num_processes: int


def find_loads(work: Work, machine: Machine) -> Loads:
    """Returns how long the work of a step would take on a machine at peak rates."""
    chip = machine.chip
    separate = machine.num_granules if chip.platform == 'tpu' else machine.size
    exchanges = _find_exchanges(work, machine)
    return add_up(work, exchanges, num_separate=separate, num_processes=machine.num_processes)


def _find_exchanges(work: Work, machine: Machine) -> tuple[ExchangeLoad, ...]:
    """The exchanges of a step, together by kind and mesh axes."""
    peak = machine.chip.peak_flops_per_device
    on_tpus = machine.chip.platform == 'tpu'
    fast, between = ('ICI', 'DCN') if on_tpus else ('NVLink', 'network')
    exchanges: dict[str, ExchangeLoad] = {}
    for collective in work.collectives:
        links = links_of(collective, machine)
        slow = links.granules > 1
        axes = ', '.join(collective.axes) or f'{collective.group_size} devices'
        name = f'{collective.kind} over {axes} ({between if slow else fast})'
        load = exchanges.setdefault(name, ExchangeLoad(name=name, slow=slow))
        share = collective.share_of_pair  # of the time, and of the products that hide it
        seconds = time_exchange(collective, links, machine) * share
        load.seconds += seconds * collective.count
        meanwhile = collective.flops_meanwhile / peak * share
        load.covered += min(seconds, meanwhile) * collective.count
        if 0 < seconds <= meanwhile:
            continue
        load.count += collective.count
        load.phases += _phases(collective, links) * collective.count
        load.hops += links.hops * collective.count
    return tuple(exchanges.values())


def add_up(
    work: Work, exchanges: tuple[ExchangeLoad, ...], *, num_separate: int, num_processes: int
) -> Loads:
    """Returns the parts of a step whose exchanges are known; `Loads` explains the arguments."""
    chip = CHIPS[work.chip]
    peak, bandwidth = chip.peak_flops_per_device, chip.hbm_bandwidth / chip.devices
    products = work.layers.products if work.layers else ()
    return Loads(
        chip=work.chip,
        products=(work.matmul_flops + sum(_added(p, chip) for p in products)) / peak,
        product_memory=sum(p.nbytes for p in products if not p.of_vectors) / bandwidth,
        estimated_products=work.matmul_seconds,
        memory=(work.other_bytes + sum(p.nbytes for p in products if p.of_vectors)) / bandwidth,
        estimated_others=work.other_seconds,
        kernels=sum(_padded(kernel, chip) for kernel in work.kernels) / peak,
        kernel_memory=sum(kernel.nbytes for kernel in work.kernels) / bandwidth,
        exchanges=exchanges,
        host_bytes=work.host_bytes,
        num_separate=num_separate,
        num_processes=num_processes,
    )


def _added(product: Product, chip: Chip) -> float:
    """What padding adds to the FLOPs of a product, less what faster types save."""
    return (product.padding(chip.matrix_unit) / chip.speed_of(product.dtype) - 1) * product.flops


def _padded(kernel: KernelWork, chip: Chip) -> float:
    """The FLOPs of a kernel, with those on padding: heads of 128 fill half of a unit of 256."""
    unit = chip.matrix_unit
    if chip.platform != 'tpu' or not 0 < kernel.width < unit:
        return kernel.flops
    return kernel.flops * unit / kernel.width


def _phases(collective: Collective, links: Links) -> int:
    """The phases of a ring between slices or hosts: an all-reduce goes around twice."""
    twice = 2 if collective.kind == 'all-reduce' else 1
    return twice * (links.granules - 1)


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
        links = machine.links_along(collective.axes, collective.places)
        if links.size == collective.group_size or collective.kind == 'collective-permute':
            return links
    # Where nobody knows which devices they are, they count as a line.
    line = Dimension(collective.group_size, closed=False)
    return Links(size=collective.group_size, dimensions=(line,))


def time_exchange(collective: Collective, links: Links, machine: Machine) -> float:
    """The seconds that one execution of a collective takes by its bytes, without latency.

    Two in opposite directions of a ring take as long as the larger one.

    Args:
      collective: the collective.
      links: the links between its devices, from `links_of`.
      machine: the machine.
    """
    chip = machine.chip
    share = (machine.network_bandwidth or _USUAL_SHARE) / chip.devices
    sent, link = collective.wire_bytes, chip.ici_link_bandwidth
    if collective.network == 'dcn':
        return sent / share
    if chip.platform == 'gpu':
        seconds = sent / (chip.ici_links * link)
        if links.granules > 1:
            # The ring passes through a host once per GPU of the group, over different adapters.
            alone = collective.kind in (*_EVERYONE_TO_EVERYONE, 'collective-permute')
            adapters = 1 if alone else links.size // links.granules
            seconds = max(seconds, sent / (share * adapters))
        return seconds
    if not links.dimensions:  # the cores of one chip exchange data in its memory
        return sent / chip.hbm_bandwidth
    if collective.kind == 'collective-permute':
        return max(sent, collective.opposite_bytes) * links.cores / link
    seconds = sent / (links.lanes * link)
    if collective.kind in _EVERYONE_TO_EVERYONE:
        # Half of the data crosses the middle of every dimension.
        for dimension in links.dimensions:
            across = 4 * dimension.lanes * link
            seconds = max(seconds, sent * links.cores * dimension.size / across)
    return seconds
