"""Tables of a page, which its script can sort and filter."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from meshwright.report.page.markup import Child, Html, tag

_FEW = 5  # rows that need no filter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table.

    Attributes:
      key: its name in the address of the page, `#sort=bytes`.
      title: its heading.
      number: whether it has numbers, which are aligned to the right and first sorted from the
        largest.
      wide: whether its cells are whole sentences, which narrow screens show below the others.
    """

    key: str
    title: str
    number: bool = False
    wide: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of a table.

    Attributes:
      content: what it shows.
      value: the number by which it is sorted, if that is not its text.
    """

    content: Child
    value: float | None = None


def sortable_table(
    name: str, caption: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]
) -> Html:
    """Returns a table whose headings are buttons that sort it, with a field that filters it.

    Args:
      name: the name of the table within the page.
      caption: what it lists, for people who do not see it.
      columns: the columns.
      rows: one cell for each column.
    """
    head = [
        tag(
            'th',
            tag('button', column.title, type='button', data_key=column.key),
            scope='col',
            role='columnheader',
            aria_sort='none',
            class_='number' if column.number else None,
        )
        for column in columns
    ]
    count = f'{len(rows):,}'
    return tag(
        'div',
        tag(
            'p',
            tag('input', type='search', placeholder='Filter', aria_label=f'Filter: {caption}'),
            tag('span', f'{count} of {count}', class_='shown', role='status'),
            class_='filter',
            hidden=True,  # until the script runs
            data_few=len(rows) <= _FEW,
        ),
        tag(
            'table',
            tag('caption', caption, class_='hidden'),
            tag('thead', tag('tr', *head, role='row'), role='rowgroup'),
            tag('tbody', *(_row(columns, row) for row in rows), role='rowgroup'),
            role='table',
        ),
        class_='sortable',
        data_table=name,
    )


def plain_table(head: Sequence[str], rows: Sequence[Sequence[Child]]) -> Html:
    """Returns a table whose first column names the rows and that cannot be sorted."""
    return tag(
        'div',
        tag(
            'table',
            tag('thead', tag('tr', *(tag('th', title, scope='col') for title in head))),
            tag(
                'tbody',
                *(
                    tag('tr', tag('th', row[0], scope='row'), *(tag('td', c) for c in row[1:]))
                    for row in rows
                ),
            ),
        ),
        class_='plain',
        tabindex='0',
    )


def _row(columns: Sequence[Column], row: Sequence[Cell]) -> Html:
    cells = [
        tag(
            'td',
            cell.content,
            role='cell',
            data_title=column.title,
            data_value=None if cell.value is None else repr(cell.value),
            class_='number' if column.number else 'wide' if column.wide else None,
        )
        for column, cell in zip(columns, row, strict=True)
    ]
    return tag('tr', *cells, role='row')
