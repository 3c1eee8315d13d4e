"""TFRecord files, written by tensorboardX and protobuf."""

import gzip

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from tensorboardX.record_writer import RecordWriter

from train.data import InputsToTargets, TfRecords
from train.errors import ConfigError

pytestmark = pytest.mark.core

# The fields of tensorflow/core/example/: name, number, label (1: one, 3: repeated), type, message.
PROTO = {
    'BytesList': [('value', 1, 3, 12, '')],
    'FloatList': [('value', 1, 3, 2, '')],
    'Int64List': [('value', 1, 3, 3, '')],
    'Feature': [
        ('bytes_list', 1, 1, 11, 'BytesList'),
        ('float_list', 2, 1, 11, 'FloatList'),
        ('int64_list', 3, 1, 11, 'Int64List'),
    ],
    'Entry': [('key', 1, 1, 9, ''), ('value', 2, 1, 11, 'Feature')],
    'Features': [('feature', 1, 3, 11, 'Entry')],
    'Example': [('features', 1, 1, 11, 'Features')],
}


def messages():
    file = descriptor_pb2.FileDescriptorProto(name='example.proto', package='t', syntax='proto3')
    for name, fields in PROTO.items():
        message = file.message_type.add(name=name)
        for field, number, label, kind, of in fields:
            names = {'type_name': f'.t.{of}'} if of else {}
            message.field.add(name=field, number=number, label=label, type=kind, **names)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {n: message_factory.GetMessageClass(pool.FindMessageTypeByName(f't.{n}')) for n in PROTO}


def example(texts):
    kinds = messages()
    made = kinds['Example']()
    for name, values in {'score': [0.5], 'label': [3, 300], **texts}.items():
        entry = made.features.feature.add(key=name)
        if name == 'score':
            entry.value.float_list.value.extend(values)
        elif name == 'label':
            entry.value.int64_list.value.extend(values)
        else:
            entry.value.bytes_list.value.extend(values)
    return made.SerializeToString()


def write(path, examples):
    writer = RecordWriter(str(path))
    for one in examples:
        writer.write(one)
    writer.close()


PAIRS = [('Häuser ' * 50, 'houses'), ('Baum', 'tree'), ('', 'nothing')]


@pytest.mark.parametrize('compressed', [False, True])
def test_examples_are_read(tmp_path, compressed):
    path = tmp_path / 'part.tfrecord'
    write(path, [example({'de': [a.encode()], 'en': [b.encode()]}) for a, b in PAIRS])
    if compressed:
        (tmp_path / 'part.tfrecord.gz').write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    source = TfRecords(pattern=str(tmp_path / '*'), holdout_percent=0.0)
    task = InputsToTargets(source=source, inputs='de', targets='en', cache_dir=str(tmp_path / 'c'))
    opened = task.open({'inputs': None, 'targets': None})
    pairs = opened.parts[0].index.training
    decode = opened.tokenizer.decode
    assert [tuple(decode(x).decode() for x in pairs[i]) for i in range(len(pairs))] == PAIRS


def refusal(path, feature='text'):
    source = TfRecords(pattern=str(path), feature=feature)
    with pytest.raises(ConfigError) as error:
        list(source.listing().documents)
    return str(error.value)


def test_damaged_files_are_errors(tmp_path):
    path = tmp_path / 'a.tfrecord'
    write(path, [example({'text': [b'one'], 'two': [b'1', b'2']})])
    assert "record 0 has no 'txt'" in refusal(path, 'txt')
    assert "'two' has 2 byte strings" in refusal(path, 'two')
    assert "'label' has 0 byte strings" in refusal(path, 'label')
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    assert 'ends in the middle of a record' in refusal(path)
    path.write_bytes(b'{"text": "JSON lines"}')
    assert 'is not a TFRecord file' in refusal(path)
    write(path, [b'\xff\xff no message'])
    assert 'record 0 is not a tf.train.Example' in refusal(path)
