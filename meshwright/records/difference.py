"""A difference between two records: what changed, by how much, and which line explains it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from meshwright.records.record import NOWHERE, At
from partitioning.amounts import bytes_str, flops_str, seconds_str, share_str

Kind = Literal[
    'machine',
    'argument',
    'result',
    'donation',
    'constraint',
    'collective',
    'checkpoint',
    'precision',
    'computation',
    'exchange',
    'memory',
    'time',
    'rematerialization',
    'recompilation',
]
# What the code says, and not what a compiler makes of it.
OF_CODE: tuple[Kind, ...] = (
    'machine',
    'argument',
    'donation',
    'constraint',
    'collective',
    'checkpoint',
    'precision',
    'computation',
)
Unit = Literal['bytes', 'FLOPs', 'seconds', 'text']
_TIMES = 9  # larger changes are not percentages
_FORMATS: Mapping[Unit, Callable[[float], str]] = {
    'bytes': bytes_str,
    'FLOPs': flops_str,
    'seconds': seconds_str,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tolerances:
    """How much figures may differ. Layouts, types and constraints may not differ.

    Attributes:
      peak: the share by which the peak memory may differ.
      bytes: the share by which the bytes of one kind of exchange over the same axes may differ.
      sent: the share of all that a device sends by which such exchanges may differ in any case.
      time: the share by which the forecast time may differ.
    """

    peak: float = 0.01
    bytes: float = 0.01
    sent: float = 1e-4
    time: float = 0.03

    def widened(self, layers: int) -> Tolerances:
        """The tolerances for two programs whose code says the same.

        Then figures differ because a compiler fuses and schedules operations in another order.

        Args:
          layers: if a loop of one is written out in the other, the length of the longest: the
            first layer may exchange nothing for the gradient of its input. Else 0.
        """
        times = 2 if layers else 1
        sent = 1 / layers if layers else 0.0
        return Tolerances(
            peak=max(self.peak, times * _ARRANGED.peak),
            bytes=max(self.bytes, sent + times * _ARRANGED.bytes),
            sent=max(self.sent, times * _ARRANGED.sent),
            time=max(self.time, times * _ARRANGED.time),
        )


_ARRANGED = Tolerances(peak=0.06, bytes=0.03, sent=0.015, time=0.09)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """Something that means another thing now.

    Attributes:
      kind: what it is about.
      subject: what changed: an array, a kind of exchange, or a figure.
      before, after: what it was and what it is, for people; '' if it was not there.
      was, now: the same as numbers, or None.
      unit: the unit of these numbers.
      at: the line or the rule that explains it.
      others: what else changed in the same way.
    """

    kind: Kind
    subject: str
    before: str
    after: str
    was: float | None = None
    now: float | None = None
    unit: Unit = 'text'
    at: At = NOWHERE
    others: tuple[str, ...] = ()

    @property
    def is_of_code(self) -> bool:
        """Whether the code says it, whatever a compiler makes of it."""
        return self.kind in OF_CODE

    @property
    def name(self) -> str:
        """The subject, with the number of those that changed alike."""
        return f'{self.subject} and {len(self.others)} more' if self.others else self.subject

    @property
    def share(self) -> str:
        """The relative change of a number: '+6.7%' or '12 times'; '' for others."""
        if not self.was or not self.now:
            return ''
        share = self.now / self.was - 1
        if share > _TIMES:
            return f'{share + 1:,.0f} times'
        return signed_share(share)

    @property
    def line(self) -> str:
        """The difference in one line, without what explains it."""
        if not self.before:
            return f'new {self.kind}: {self.name}: {self.after}'
        if not self.after:
            return f'{self.kind} is gone: {self.name}: {self.before}'
        share = f' ({self.share})' if self.share else ''
        return f'{self.name}: {self.before} -> {self.after}{share}'


def signed_share(share: float) -> str:
    """A relative change: '+6.7%'."""
    return f'{"+" if share > 0 else "-"}{share_str(abs(share))}'


def of_numbers(
    kind: Kind, subject: str, was: float, now: float, unit: Unit, at: At = NOWHERE
) -> Difference:
    """A difference of two figures."""
    return Difference(
        kind=kind,
        subject=subject,
        before=_FORMATS[unit](was),
        after=_FORMATS[unit](now),
        was=was,
        now=now,
        unit=unit,
        at=at,
    )


def join_alike(differences: Iterable[Difference]) -> tuple[Difference, ...]:
    """Differences of several arrays that changed alike, as one each."""
    found: dict[Difference, list[str]] = {}
    for one in differences:
        alike = dataclasses.replace(one, subject='', at=dataclasses.replace(one.at, why=''))
        key = alike if one.unit == 'text' else one
        found.setdefault(key, []).append(one.subject)
    return tuple(
        dataclasses.replace(key, subject=subjects[0], others=tuple(subjects[1:]))
        for key, subjects in found.items()
    )


def new_places(before: Sequence[At], after: Sequence[At]) -> At:
    """The first place whose line says something new; the first of all if none does."""
    known = {at.text for at in before}
    return next((at for at in after if at.text not in known), after[0] if after else At())
