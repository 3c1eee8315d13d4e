"""`forecast.html`: its figures, its safety, and its behaviour in a browser without a network."""

import base64
import dataclasses
import hashlib
import re
import shutil
import subprocess

import pytest
from forecasts_by_hand import ARRAYS, GIB, collective, make_forecast, mesh_of, step_time
from mock_devices import gpus, tpus

import partitioning
from meshwright.report.page import render_page, write_page
from meshwright.user_lines import short_source
from partitioning.hardware import CHIPS
from partitioning.mesh import axis_rings, find_placement

BROWSER = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'chrome'))), None)
ATTACK = '<img src=x onerror="alert(1)"></code></script>'


def in_browser(path, hash_, profile):
    """Opens a file without a network; returns the page as it is then, and what it logged."""
    done = subprocess.run(
        [
            BROWSER,
            '--headless',
            '--no-sandbox',
            '--disable-gpu',
            '--no-first-run',
            '--host-resolver-rules=MAP * ~NOTFOUND',
            '--proxy-server=127.0.0.1:9',
            '--enable-logging=stderr',
            f'--user-data-dir={profile}',
            '--virtual-time-budget=3000',
            '--dump-dom',
            f'{path.as_uri()}{hash_}',
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, [line for line in done.stderr.splitlines() if ':CONSOLE' in line]


def table_in(dom, name):
    """The table with this name in a page."""
    return dom.partition(f'data-table="{name}"')[2].partition('</table>')[0]


def paths_in(table, hidden=False):
    """The first cells of the rows of a table that are shown, or of those that are not."""
    rows = re.findall(r'<tr role="row"( hidden="")?><td[^>]*><code>(.*?)</code>', table)
    return [path for away, path in rows if bool(away) == hidden]


@pytest.fixture(scope='module')
def two():
    """One forecast that fits and one that does not, the first with names that attack the page."""
    attacked = ARRAYS[0]._replace(path=f'params/{ATTACK}')
    good = make_forecast(arrays=(attacked, *ARRAYS[1:]), warnings=(ATTACK,), notes=(ATTACK,))
    mesh = mesh_of(tpus((16, 16, 1), 'TPU v6 lite'), fsdp=32, tensor=8)
    chip = CHIPS['v6e']
    bad = make_forecast(
        topology='v6e:16x16',
        chip=chip,
        num_devices=256,
        mesh=dict(mesh.shape),
        memory=dataclasses.replace(good.memory, limit=chip.hbm_bytes, peak=40 * GIB),
        rings=tuple(axis_rings(mesh)),
        placement=find_placement(mesh),
    )
    return good, bad


@pytest.mark.skipif(BROWSER is None, reason='Chromium is not installed')
def test_a_browser_shows_the_page_without_a_network(two, tmp_path):
    write_page(two, tmp_path / 'forecast.html')
    address = '#topology=2&sort=bytes&order=ascending'
    dom, console = in_browser(tmp_path / 'forecast.html', address, tmp_path / 'profile')
    assert not console
    # The script ran, under the policy of the page: the second machine is shown, and it is sorted.
    machines = re.findall(r'<article id="(machine-\d)"([^>]*)>', dom)
    assert ['away' in attributes for _, attributes in machines] == [True, False]
    arrays = table_in(dom, 'machine-2-arrays')
    assert '<th scope="col" role="columnheader" aria-sort="ascending" class="number">' in arrays
    # 16 KiB (the whole scale), 32 KiB, and 128256 * 4096 * 4 / 64 bytes = 31.3 MiB
    assert paths_in(arrays)[:3] == ['params/norm/scale', 'batch/tokens', 'params/embedding']
    assert '31.3 MiB' in arrays
    assert '<img' not in dom and 'params/&lt;img src=x' in dom


@pytest.mark.skipif(BROWSER is None, reason='Chromium is not installed')
def test_headings_sort_and_fields_filter(two, tmp_path):
    clicks = """<script>
      const table = document.querySelector('[data-table="machine-1-arrays"]');
      for (const key of ['array', 'bytes']) table.querySelector(`[data-key=${key}]`).click();
      const field = table.querySelector('input');
      field.value = 'PARAMS mlp';
      field.dispatchEvent(new Event('input'));
      document.querySelectorAll('[role=tab]')[1].click();
      document.body.dataset.address = location.hash;
    </script></body>"""
    text = re.sub(r'<meta http-equiv[^>]*>', '', render_page(two)).replace('</body>', clicks)
    (tmp_path / 'page.html').write_text(text)
    dom, console = in_browser(tmp_path / 'page.html', '', tmp_path / 'profile')
    assert not console
    arrays = table_in(dom, 'machine-1-arrays')
    assert paths_in(arrays) == ['params/layers/mlp/down', 'params/layers/mlp/up']
    assert len(paths_in(arrays, hidden=True)) == 4
    assert paths_in(arrays, hidden=True)[-1] == 'params/norm/scale'  # the smallest is the last
    assert '>2 of 6<' in arrays
    address = re.search('data-address="([^"]*)"', dom)[1].replace('&amp;', '&')
    assert {*address[1:].split('&')} == {
        'table=arrays',
        'sort=bytes',
        'order=descending',
        'filter=PARAMS+mlp',
        'topology=2',
    }


def test_the_page_has_the_figures():
    page = render_page(make_forecast())
    for figure in (
        '7.50 GiB of 95.73 GiB at the peak (7.8%), 88.23 GiB free',
        '3.3% less than the compiler',  # 7.25 of 7.5 GiB
        '800 ms per step, between 760 ms and 850 ms; MFU 54%',
        'the model takes 250 ms more as hidden behind computation',
        'Each device sends 54.02 GiB per call',  # (96 * 5e8 + 64 * 1e8 + 3.6e9) / 2**30
        'fitted on 14 measured steps of v5p',
        '100 GB/s',
        '44.70 GiB',
        'train/models/transformer.py:88',
        'The whole table is gathered before the lookup.',
        'confirmed by compiling',
        'norm: a rule replicates it',
        'libtpu 0.0.52',
    ):
        assert figure in page, figure


def test_what_is_too_small_to_see_is_added_up():
    """Of 1 s, parts of 3 ms and 1 ms are below half a percent; 1,000 bytes are far below 45 GiB."""
    parts = (('matrix products', 0.996), ('exchange', 0.003), ('overhead', 0.001))
    time = step_time(0.9, 1.0, 1.1, [(name, s, s) for name, s in parts])
    tiny = collective('all-reduce', ('fsdp', 'tensor'), 64, ('f32[]',), 1000.0, 1, 'train/a.py:1')
    known = make_forecast().collectives
    page = render_page(make_forecast(time=time, collectives=(*known, (tiny, None))))
    assert re.search('2 smaller parts</span><span class="figure">4 ms', page)
    assert 'In addition, over fsdp x tensor 1.0 KiB.' in page


def test_the_policy_allows_exactly_the_style_and_the_script_of_the_page():
    page = render_page(make_forecast())
    policy = re.search('content="(default-src [^"]*)"', page)[1].replace('&#x27;', "'")
    for element in ('style', 'script'):
        [text] = re.findall(f'<{element}>(.*?)</{element}>', page, re.S)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{element}-src 'sha256-{digest}'" in policy
    assert not re.findall(r'<[^>]*\s(?:src|on\w+|style|xlink:href)=', page)
    assert {*re.findall(r'href="([^"]*)"', page)} <= {'#machine-1'}


def test_links_and_chips_are_drawn():
    """A 4 x 4 x 4 torus: 24 links in a plane, 16 ends of those that close rings, 2 ends along z."""
    page = render_page(make_forecast())
    figures = re.findall('<figure>.*?</figure>', page, re.S)
    assert [re.search('<b>(.*?)</b>', figure)[1] for figure in figures] == ['fsdp 16', 'tensor 4']
    for figure, size in zip(figures, (16, 4), strict=True):
        assert len(re.findall('<rect', figure)) == 64
        [links] = re.findall('<path d="([^"]*)" class="link"', figure)
        [ends] = re.findall('<path d="([^"]*)" class="end"', figure)
        assert links.count('M') == 4 * 24 and ends.count('M') == 4 * 16 + 64 * 2
        assert figure.count(' on"') == size
    assert 'each step is one link, and so is the way back to the first device' in figures[1]


def test_gpus_have_hosts():
    mesh = mesh_of(gpus(8, 2), fsdp=16)
    forecast = make_forecast(
        topology='h100:2x8',
        chip=CHIPS['h100'],
        mesh={'fsdp': 16},
        num_devices=16,
        rings=tuple(axis_rings(mesh)),
        placement=find_placement(mesh),
    )
    page = render_page(forecast)
    [fast] = re.findall('<path d="([^"]*)" class="link fast"', page)
    assert fast.count('M') == 2 and 'NVLink + network' in page and 'host 1, device 7' in page


def test_what_is_not_known_is_left_out():
    known = make_forecast()
    memory = dataclasses.replace(known.memory, limit=None, temporaries=None, buffers=())
    page = render_page(
        make_forecast(
            chip=None,
            memory=memory,
            time=None,
            back_end='none',
            back_end_version='',
            collectives=(),
            replicated=(),
            arrays=(),
            rings=(),
            placement=None,
        )
    )
    assert 'limit not known' in page and 'the limit of this chip is not known' in page
    assert 'Not forecast: nothing was compiled for this machine.' in page
    assert 'Not known: nothing was compiled.' in page
    assert 'Largest buffers' not in page and 'Replicated' not in page


@pytest.mark.parametrize(
    ('source', 'shown'),
    [
        ('/opt/venv/lib/python3.11/site-packages/flax/nn.py:7', 'flax/nn.py:7'),
        ('/data/code/lm/models/mlp.py:30', 'lm/models/mlp.py:30'),
        ('train/models/mlp.py:30', 'train/models/mlp.py:30'),
        (f'{partitioning.__path__[0]}/mesh/a.py:7', 'partitioning/mesh/a.py:7'),
        ('', ''),
    ],
)
def test_folders_of_one_computer_are_left_out(source, shown):
    assert short_source(source) == shown


def test_a_page_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match='at least one forecast'):
        write_page([], tmp_path / 'forecast.html')
    assert not (tmp_path / 'forecast.html').exists()
