// Sorts and filters tables, and shows one machine at a time. The page is complete without it.
// Its state is in the address: #topology=2&sort=bytes&order=descending&table=arrays&filter=mlp
'use strict';

const natural = new Intl.Collator('en', { numeric: true });
const machines = [...document.querySelectorAll('article')];
const tables = [...document.querySelectorAll('.sortable')];

function valueOf(row, column) {
  const cell = row.cells[column];
  const value = cell.dataset.value;
  return value === undefined ? cell.textContent : Number(value);
}

function sortBy(table, key, order) {
  const headings = [...table.querySelectorAll('thead th')];
  const column = headings.findIndex((th) => th.firstChild.dataset.key === key);
  if (column < 0) return;
  const sign = order === 'descending' ? -1 : 1;
  const body = table.querySelector('tbody');
  const rows = [...body.rows].map((row) => [valueOf(row, column), row]);
  rows.sort(([a], [b]) => sign * (typeof a === 'number' ? a - b : natural.compare(a, b)));
  body.append(...rows.map(([, row]) => row));
  headings.forEach((th, i) => th.setAttribute('aria-sort', i === column ? order : 'none'));
}

const firstOrder = (heading) =>
  heading.classList.contains('number') ? 'descending' : 'ascending';

function nextOrder(heading) {
  const now = heading.getAttribute('aria-sort');
  if (now === 'none') return firstOrder(heading);
  return now === 'ascending' ? 'descending' : 'ascending';
}

function filterBy(table, text) {
  const words = text.toLowerCase().split(/\s+/);
  const rows = [...table.querySelectorAll('tbody tr')];
  let shown = 0;
  for (const row of rows) {
    const held = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => held.includes(word));
    shown += !row.hidden;
  }
  const count = (n) => n.toLocaleString('en');
  table.querySelector('.shown').textContent = `${count(shown)} of ${count(rows.length)}`;
}

function keep(changes) {
  const state = new URLSearchParams(location.hash.slice(1));
  for (const [key, value] of Object.entries(changes)) {
    if (value) state.set(key, value);
    else state.delete(key);
  }
  history.replaceState(null, '', `#${state}`);
}

// 'arrays' for the table 'machine-2-arrays'
const shortName = (table) => table.dataset.table.replace(/^machine-\d+-/, '');

for (const table of tables) {
  const filter = table.querySelector('.filter');
  filter.hidden = 'few' in filter.dataset;
  const field = filter.querySelector('input');
  field.addEventListener('input', () => {
    filterBy(table, field.value);
    keep({ table: shortName(table), filter: field.value });
  });
  table.querySelector('thead').addEventListener('click', (event) => {
    const button = event.target.closest('button');
    if (!button) return;
    const order = nextOrder(button.parentElement);
    sortBy(table, button.dataset.key, order);
    keep({ table: shortName(table), sort: button.dataset.key, order });
  });
}

const tabs = document.createElement('nav');

function show(number) {
  machines.forEach((machine, i) => machine.classList.toggle('away', i !== number));
  [...tabs.children].forEach((tab, i) => {
    tab.setAttribute('aria-selected', String(i === number));
    tab.tabIndex = i === number ? 0 : -1;
  });
}

function choose(number) {
  show(number);
  keep({ topology: number + 1 });
}

if (machines.length > 1) {
  tabs.setAttribute('role', 'tablist');
  tabs.setAttribute('aria-label', 'machines');
  machines.forEach((machine, number) => {
    const tab = document.createElement('button');
    tab.type = 'button';
    tab.textContent = machine.dataset.title;
    tab.setAttribute('role', 'tab');
    tab.setAttribute('aria-controls', machine.id);
    machine.setAttribute('role', 'tabpanel');
    machine.setAttribute('aria-label', machine.dataset.title);
    tab.addEventListener('click', () => choose(number));
    tabs.append(tab);
  });
  tabs.addEventListener('keydown', (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const now = machines.findIndex((machine) => !machine.classList.contains('away'));
    const next = (now + step + machines.length) % machines.length;
    choose(next);
    tabs.children[next].focus();
  });
  machines[0].before(tabs);
  document.querySelectorAll('.compare thead a').forEach((link, number) => {
    link.addEventListener('click', (event) => {
      event.preventDefault();
      choose(number);
      tabs.scrollIntoView();
    });
  });
}

function restore() {
  const state = new URLSearchParams(location.hash.slice(1));
  const linked = machines.findIndex((machine) => `#${machine.id}` === location.hash);
  if (machines.length > 1) {
    const number = linked >= 0 ? linked : Number(state.get('topology') || 1) - 1;
    show(Math.min(Math.max(number, 0), machines.length - 1));
  }
  for (const table of tables) {
    if (shortName(table) !== (state.get('table') || 'arrays')) continue;
    const key = state.get('sort');
    const heading = [...table.querySelectorAll('thead button')].find((b) => b.dataset.key === key);
    if (heading) sortBy(table, key, state.get('order') || firstOrder(heading.parentElement));
    const text = state.get('filter') || '';
    table.querySelector('input').value = text;
    filterBy(table, text);
  }
}

addEventListener('hashchange', restore);
restore();
