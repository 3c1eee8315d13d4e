"""Dumps of XLA and jax: exchanges counted by hand, the compiler's own memory, and damaged files."""

import json
import os
import re
import shutil
from pathlib import Path

import jax
import pytest
from contract import check_answers
from dumped_programs import EXCHANGED, added_up, exchange, make_mesh, train

from meshwright import dump_table, read_dump
from meshwright.dumps.mesh_sizes import infer_mesh
from meshwright.dumps.shardings import read_layout
from meshwright.program.collectives import MeshAxes, parse_groups
from train.cli import main

AXES = MeshAxes(sizes={'data': 4, 'model': 2})


@pytest.fixture(scope='module')
def dumped(tmp_path_factory):
    """A folder of `--xla_dump_to` with two programs, and jax's own figures of both."""
    folder = tmp_path_factory.mktemp('dump')
    texts, sizes = {}, {}
    for make in (exchange, train):
        function, arguments = make(make_mesh(jax.devices()))
        lowered = function.lower(*arguments)
        compiled = lowered.compile({'xla_dump_to': str(folder)})
        name = function.__name__
        sizes[name] = compiled.memory_analysis()
        texts[name] = {
            'compiled': compiled.as_text(),
            'stablehlo': lowered.as_text(),
            'with lines': lowered.as_text(debug_info=True),
            'hlo': lowered.as_text(dialect='hlo'),
        }
    return folder, texts, sizes


@pytest.fixture
def write(tmp_path):
    """Returns a function (text, name) -> the file that it writes."""

    def write(text, name='program.txt'):
        file = tmp_path / name
        file.write_bytes(text) if isinstance(text, bytes) else file.write_text(text)
        return file

    return write


def test_the_largest_compiled_module_of_a_folder_has_jaxs_own_memory(dumped):
    folder, _, sizes = dumped
    program, own = read_dump(folder), sizes['train_step']
    assert (program.name, program.stage, program.back_end) == ('jit_train_step', 'compiled', 'cpu')
    assert (program.mesh.sizes, program.mesh_from) == ({'data': 4, 'model': 2}, 'the dump')
    memory = program.memory
    assert memory.arguments == own.argument_size_in_bytes == (2 * 6 * 64 * 256 + 128 * 128) * 4 // 8
    assert memory.temporaries == own.temp_size_in_bytes > 0
    assert (memory.outputs, memory.aliased) == (
        own.output_size_in_bytes,
        own.alias_size_in_bytes,
    )
    assert program.peak == memory.arguments + memory.temporaries + memory.outputs - memory.aliased
    sent = added_up(program)
    # Each layer gathers a quarter of both halves three times at most, and sums over model twice.
    nbytes, count = sent['all-gather', ('data',)]
    assert count % 12 == 0 and nbytes == count * (64 * 128 * 4) * 3 / 4
    assert sent['all-reduce', ('model',)] == (12 * 32 * 64 * 4, 12)
    assert {m.function for m in program.modules} == {'jit_train_step', 'jit_exchanges'}
    text = dump_table(program)
    assert 'mesh data 4 x model 2, from the dump' in text and 'dumped_programs.py:' in text
    assert 'jit_exchanges, compiled' in text


@pytest.mark.parametrize('name', ['jit_exchanges', 'exchanges', None])
def test_every_kind_of_exchange_is_counted_by_hand(dumped, name):
    folder, _, _ = dumped
    [numbered] = [m.name for m in read_dump(folder).modules if 'exchanges' in m.name]
    program = read_dump(folder, module=name or numbered)
    assert added_up(program) == EXCHANGED
    assert all(re.search(r'dumped_programs\.py:\d+$', c.source) for c in program.collectives)


# Groups of devices as axes, as jax writes them from 0.12 on.
BY_AXES = {
    'dense<[[0, 2, 4, 6], [1, 3, 5, 7]]> : tensor<2x4xi64>': ['data'],
    'dense<[[0, 1], [2, 3], [4, 5], [6, 7]]> : tensor<4x2xi64>': ['model'],
    'dense<[[0, 1, 2, 3, 4, 5, 6, 7]]> : tensor<1x8xi64>': ['data', 'model'],
}


def by_axes(text):
    for groups, axes in BY_AXES.items():
        named = ', '.join(f'#stablehlo.axis_ref<name = "{axis}">' for axis in axes)
        new = f'#stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [{named}]>'
        text = text.replace(groups, new)
    assert text.count('replica_group_mesh_axes') == 5
    return text


@pytest.mark.parametrize('form', ['stablehlo', 'axes', 'with lines', 'hlo', 'before', 'compiled'])
def test_every_form_of_a_program_says_the_same(dumped, form, write):
    """What a shard_map asks for is there before the program is partitioned."""
    folder, texts, _ = dumped
    if form == 'before':
        [file] = folder.glob('*jit_exchanges.before_optimizations.txt')
    elif form == 'axes':
        file = write(by_axes(texts['exchanges']['stablehlo']))
    else:
        file = write(texts['exchanges'][form])
    program = read_dump(file, mesh={'data': 4, 'model': 2} if form == 'compiled' else None)
    assert added_up(program) == EXCHANGED
    assert program.stage == ('compiled' if form == 'compiled' else 'not partitioned')
    has_lines = form in ('with lines', 'before', 'compiled')
    assert has_lines == all('dumped_programs.py:' in c.source for c in program.collectives)
    asked = 'only what the program itself asks for' in dump_table(program)
    assert asked == (form != 'compiled')


@pytest.mark.parametrize('form', ['stablehlo', 'with lines', 'hlo', 'before', 'tiles'])
def test_a_program_that_is_not_partitioned_has_layouts_and_no_exchanges(dumped, form, write):
    """Layouts as axes, as Shardy has them, or as tiles of devices."""
    folder, texts, _ = dumped
    [before] = folder.glob('*jit_train_step.before_optimizations.txt')
    if form == 'tiles':
        without = re.sub(
            r', frontend_attributes=\{xla\.sdy\.sharding=[^}]*\}"?\}?', '', before.read_text()
        )
        if 'devices=[1,2,4]' not in without:
            pytest.skip('this version of XLA writes no tiles')
        assert 'sdy.sharding<' not in without
        before = write(without)
    program = read_dump(before if form in ('before', 'tiles') else write(texts['train_step'][form]))
    assert (program.stage, program.collectives, program.peak) == ('not partitioned', (), None)
    layouts = {one.array: (str(one.layout), one.bytes_per_device) for one in program.arguments}
    assert layouts == {
        'f32[6,64,256]': ("P(None, 'data', 'model')", 6 * 64 * 256 * 4 // 8),
        'f32[6,256,64]': ("P(None, 'model', 'data')", 6 * 64 * 256 * 4 // 8),
        'f32[128,64]': ("P('data', None)", 128 * 64),
    }
    text = dump_table(program)
    assert 'It has no exchanges yet' in text and '3 of 3 arguments are sharded' in text
    if form in ('with lines', 'before'):
        assert "params['up'] f32[6,64,256], P(None, 'data', 'model')" in text


@pytest.mark.parametrize(
    ('groups', 'sizes'),
    [
        (['replica_groups={{0,2,4,6},{1,3,5,7}}'], [4, 2]),
        (['replica_groups=[4,2]<=[8]'], [4, 2]),
        (['replica_groups=[2,4]<=[4,2]T(1,0)', 'replica_groups={{0,1},{2,3},{4,5},{6,7}}'], [4, 2]),
        (['source_target_pairs={{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}'], [4, 2]),
        (['replica_groups=[2,4]<=[2,2,2]T(1,0,2)'], [2, 2, 2]),
        (['replica_groups={{0,1,2,3,4,5,6,7}}'], [8]),
        (['replica_groups={}'], [8]),
        (['replica_groups={{0,3},{1,2}}'], None),
    ],
)
def test_a_mesh_is_inferred_from_groups_of_devices(groups, sizes):
    found = infer_mesh([parse_groups(text, 8) for text in groups], 8)
    assert (list(found.sizes.values()) if found else None) == sizes


def test_the_order_of_the_devices_of_a_mesh_counts():
    """Along model, the mesh [[0, 4], [1, 5], [2, 6], [3, 7]] has neighbours that are 4 apart."""
    turned = MeshAxes(sizes=AXES.sizes, order=(0, 4, 1, 5, 2, 6, 3, 7))
    assert turned.within(((0, 4), (1, 5))) == ('model',)
    assert AXES.within(((0, 4), (1, 5))) == ('data',)


@pytest.mark.parametrize(
    ('text', 'axes'),
    [
        ('{devices=[4,2]<=[8]}', (('data',), ('model',))),
        ('{devices=[1,8]<=[8]}', ((), ('data', 'model'))),
        ('{devices=[2,4]<=[4,2]T(1,0)}', (('model',), ('data',))),
        ('{devices=[4,1,2]<=[8] last_tile_dim_replicate}', (('data',), ())),
        ('{devices=[2,1,4]<=[4,2]T(1,0) last_tile_dims={manual}}', (('model',), ())),
        ('{devices=[2,1,4]0,2,4,6,1,3,5,7 last_tile_dim_replicate}', (('model',), ())),
        ("{mesh['data'=4,'model'=2], [{'data'}, {}]}", (('data',), ())),
        ("{mesh['data'=4,'model'=2], [{}, {'data','model'}]}", ((), ('data', 'model'))),
        ("{mesh['data'=4,'model'=2], [{'model'}, {}], replicated={'data'}}", (('model',), ())),
        ('<@mesh, [{"data", ?}, {}p1], replicated={"model"}>', (('data',), ())),
        ('<@mesh, [{"data":(1)2}, {"model"}]>', (('data:(1)2',), ('model',))),
        ('{replicated}', ()),
    ],
)
def test_shardings_in_a_text(text, axes):
    assert read_layout(text, AXES).axes == axes


WRAPPED = """\
HloModule jit_f, is_scheduled=true, num_partitions=8

%inner (p: f32[16]) -> f32[64] {
  %p = f32[16]{0} parameter(0)
  ROOT %gather = f32[64] all-gather(f32[16] %p), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
}, execution_thread="sparsecore"

%body (b: (s32[], f32[16])) -> (s32[], f32[16]) {
  %b = (s32[], f32[16]{0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %x = f32[16]{0} get-tuple-element(%b), index=1
  %start = ((f32[16]{0}), f32[64]{0}, u32[]) STARTED
  %done = f32[64]{0} async-done(%start)
  %slice = f32[16]{0} slice(%done), slice={[0:16]}
  ROOT %t = (s32[], f32[16]{0}) tuple(%i, %slice)
}

%wrapped (w: f32[16]) -> f32[64] {
  %w = f32[16]{0} parameter(0)
  ROOT %core = f32[64] custom-call(%w), custom_call_target="core", called_computations={%inner}
}, execution_thread="sparsecore"

%condition (c: (s32[], f32[16])) -> pred[] {
  %c = (s32[], f32[16]{0}) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  %limit = s32[] constant(5)
  ROOT %less = pred[] compare(%n, %limit), direction=DIRECTION
}

ENTRY %main (q: f32[16]) -> f32[16] {
  %q = f32[16]{0} parameter(0)
  %zero = s32[] constant(0)
  %both = (s32[], f32[16]{0}) tuple(%zero, %q)
  %loop = (s32[], f32[16]{0}) while(%both), condition=%condition, body=%body
  ROOT %r = f32[16]{0} get-tuple-element(%loop), index=1
}
"""


@pytest.mark.parametrize(
    'started',
    [
        'async-start(%x), calls=%inner',
        'async-start(%x), calls=%wrapped',
        'call-start(%x), to_apply=%inner',
        'all-gather-start(%x), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}',
    ],
)
@pytest.mark.parametrize(('direction', 'count'), [('LT', 5), ('NE', 1)])
def test_asynchronous_exchanges_in_loops(started, direction, count, write):
    text = WRAPPED.replace('STARTED', started).replace('DIRECTION', direction)
    program = read_dump(write(text), mesh={'data': 4, 'model': 2})
    [one] = program.collectives
    assert (one.kind, one.axes, one.wire_bytes) == ('all-gather', ('data',), 3 * 64)
    assert (one.count, one.asynchronous) == (count, True)
    assert ('length of a loop' in dump_table(program)) == (direction == 'NE')


def test_a_partitioned_program_is_told_by_its_exchanges(write):
    """Its parameters keep their shardings, as in a dump of MaxText for four GPUs."""
    text = WRAPPED.replace('is_scheduled=true, ', '').replace('DIRECTION', 'LT')
    text = text.replace('STARTED', 'async-start(%x), calls=%inner')
    text = text.replace(
        '%q = f32[16]{0} parameter(0)', '%q = f32[16] parameter(0), sharding={devices=[8]<=[8]}'
    )
    program = read_dump(write(text))
    assert (program.stage, program.arguments, program.arguments_bytes) == ('partitioned', (), 64)
    assert program.collectives[0].count == 5 and program.peak is None
    assert 'partitioned, and not optimized' in dump_table(program)


def test_replicas_are_devices(write):
    text = WRAPPED.replace('num_partitions=8', 'replica_count=8').replace('DIRECTION', 'LT')
    text = text.replace('STARTED', 'async-start(%x), calls=%inner')
    program = read_dump(write(text.replace('replica_groups=[2,4]<=[4,2]T(1,0), ', '')))
    assert (program.num_devices, program.collectives[0].group_size) == (8, 8)


def test_a_chip_gives_a_limit(dumped, meshwright, capsys):
    folder, texts, _ = dumped
    program = read_dump(folder)
    assert program.limit is None and program.fits is None
    text = texts['train_step']['compiled'].replace('f32[6,16,128]', 'f32[6,65536,131072]')
    file = folder.parent / 'large.txt'
    file.write_text(text)
    status, out, _ = meshwright('explain', str(file), '--chip=v5e', '--json')
    check_answers(json.loads(out))
    [answer] = json.loads(out)['answers']
    assert (status, answer['fits'], answer['chip']) == (1, False, 'v5e')
    assert answer['peak'] > answer['limit'] == 16_911_433_728
    status, out, _ = meshwright('explain', str(file), '--chip=v5e')
    assert status == 1 and re.search(r'fits +NO, lacks [\d,.]+ GiB', out)


@pytest.fixture
def meshwright(capsys):
    """Returns a function that runs a command: (status, output, errors)."""

    def run(*arguments):
        try:
            status = main(list(arguments))
        except SystemExit as ended:
            status = ended.code
        return (status, *capsys.readouterr())

    return run


HLO = 'HloModule jit_f, is_scheduled=true, num_partitions=8\n'


@pytest.mark.parametrize(
    ('held', 'flags', 'words'),
    [
        (None, [], ['does not exist', '--xla_dump_to']),
        ({}, [], ['is empty', 'XLA_FLAGS=--xla_dump_to=']),
        ({'sub/a.txt': 'x'}, [], ['only folders', 'sub']),
        ({'module_0000.jit_f.hlo.pb': b'\0'}, [], ['binary modules', '--xla_dump_hlo_as_text']),
        (
            {'notes.txt': 'x', 'a.ll': 'y'},
            [],
            ['has no module', 'found 2 others', 'a.ll, notes.txt'],
        ),
        ('', [], ['is empty']),
        ('print("hello")\n', [], ['neither HLO nor StableHLO', 'HloModule']),
        ('{"module": 1}', [], ['neither HLO nor StableHLO']),
        (b'\x08\x01\x12\xff\0', [], ['is binary', '--xla_dump_hlo_as_text']),
        (b'ML\xefR\x01', [], ['MLIR bytecode', 'lowered.compiler_ir()']),
        (HLO, [], ['no ENTRY computation']),
        (WRAPPED[:700], [], ['is cut off']),
        (WRAPPED[: WRAPPED.index('ENTRY')], [], ['no ENTRY computation']),
        (WRAPPED[: WRAPPED.index('\n  ROOT %r')], [], ["cut off: the computation 'main'"]),
        (WRAPPED.replace('%inner (p', '%other (p'), [], ["'start' uses 'inner'", 'not there']),
        (WRAPPED.replace('ROOT %r', '%r'), [], ['cannot be read', 'StopIteration']),
        (WRAPPED.replace('STARTED', 'call(%x), to_apply=%body'), [], ['RecursionError']),
        (WRAPPED.replace('[16]{0} param', '[16]{0:T(0)} param'), [], ['ZeroDivisionError']),
        ('module @jit_f {\n  func.func @main() {\n', [], ['cut off: 2 regions']),
        ('module @jit_f {\n}\nstablehlo', [], ['no function', 'func.func']),
        (WRAPPED, ['--mesh=data=4,model=4'], ['16 devices', 'runs on 8', 'product is 8']),
        (WRAPPED, ['--mesh=data:4'], ["'data:4' must be AXIS=SIZE", '--mesh=data=4,model=2']),
        (WRAPPED, ['--mesh=data=4,data=2'], ["the axis 'data' twice"]),
        (WRAPPED, ['--module=jit_f'], ['is one module', 'leave out --module']),
        (WRAPPED, ['--chip=v5q'], ["no chip 'v5q'", 'v5p']),
        (
            WRAPPED.replace('f32[16]{0} parameter', 'f32[16]{0:T(128)} parameter'),
            ['--chip=h100'],
            ['compiled for a TPU', 'h100 is a GPU'],
        ),
        (WRAPPED, ['--limit=3'], ['--limit=3', '--help']),
    ],
)
def test_a_misuse_is_one_line(held, flags, words, tmp_path, meshwright):
    path = tmp_path / 'dump'
    if isinstance(held, dict):
        path.mkdir()
        for name, content in held.items():
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    elif held is not None:
        text = (
            held.replace('STARTED', 'async-start(%x), calls=%inner')
            if isinstance(held, str)
            else held
        )
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    status, out, err = meshwright('explain', str(path), *flags)
    assert (status, out, err.count('\n')) == (2, '', 1)
    assert err.startswith('error: ') and all(word in err for word in words), err


def test_no_module_of_that_name(dumped, meshwright):
    status, _, err = meshwright('explain', str(dumped[0]), '--module=jit_train_stp')
    assert status == 2 and "Did you mean 'jit_train_step'?" in err and 'jit_exchanges' in err


@pytest.mark.skipif(os.geteuid() == 0, reason='root reads every file')
def test_a_file_that_must_not_be_read(write, meshwright):
    file = write(WRAPPED)
    file.chmod(0)
    status, _, err = meshwright('explain', str(file))
    assert status == 2 and 'cannot be read: Permission denied' in err


def test_every_cut_of_a_text_is_one_line(dumped, write):
    """Wherever a copy ends, the message is about the text, and nothing else is raised."""
    _, texts, _ = dumped
    for form in ('compiled', 'with lines'):
        text = texts['exchanges'][form]
        for part in range(1, 40):
            file = write(text[: len(text) * part // 40])
            try:
                read_dump(file)
            except ValueError as error:
                assert '\n' not in str(error) and str(file) in str(error)
            else:
                assert form == 'with lines', 'the end of StableHLO is a table of lines'


def test_exchanges_of_a_stage_of_shardy_are_named(write):
    line = (
        '%0 = sdy.all_gather [{"data"}, {}] %arg0 out_sharding=<@mesh, [{}, {}]> : tensor<4x4xf32>'
    )
    text = f'module @m {{\n  func.func @main(%arg0: tensor<4x4xf32>) {{\n    {line}\n  }}\n}}\n'
    assert '1 exchanges of a stage of Shardy' in dump_table(read_dump(write(text)))


def test_a_folder_of_jax_and_comments_before_a_program(dumped, tmp_path):
    """JAX_DUMP_IR_TO writes StableHLO, whose largest module is read."""
    _, texts, _ = dumped
    (tmp_path / 'jax_ir0000_jit_small_compile.mlir').write_text(
        'module @jit_small {\n  func.func public @main(%arg0: tensor<4xf32>) {\n  }\n}\n'
    )
    text = f'// what jax has lowered\n\n{texts["exchanges"]["with lines"]}'
    (tmp_path / 'jax_ir0001_jit_exchanges_compile.mlir').write_text(text)
    program = read_dump(tmp_path)
    assert program.name == 'jit_exchanges' and added_up(program) == EXCHANGED
    small = read_dump(tmp_path, module='small')
    assert (small.num_devices, small.collectives, small.arguments_bytes) == (1, (), 16)
    assert 'It runs on one device, and sends nothing.' in dump_table(small)


def test_a_folder_without_buffer_assignments_has_a_peak_by_live_ranges(dumped, tmp_path):
    folder = Path(shutil.copytree(dumped[0], tmp_path / 'copy'))
    for file in folder.glob('*buffer-assignment*'):
        file.unlink()
    program, exact = read_dump(folder), read_dump(dumped[0])
    assert program.memory is None and program.arguments_bytes == exact.arguments_bytes
    assert program.peak == pytest.approx(exact.peak, rel=0.25)
    assert 'estimated by live ranges' in dump_table(program)
