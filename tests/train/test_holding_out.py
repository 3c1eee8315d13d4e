"""Which documents are held out for evaluation."""

import math
from collections import Counter

import pytest
from written_files import documents_of_both_parts, index_of, numbered, write

from train.data import TextFiles

pytestmark = pytest.mark.core


def test_whole_files_are_held_out(tmp_path):
    contents = numbered(300)
    write(tmp_path, contents)
    source = TextFiles(pattern='**/*.txt', root=str(tmp_path), holdout_percent=20)
    training, held_out = documents_of_both_parts(source, tmp_path / 'cache')
    assert Counter(training + held_out) == Counter(contents.values())
    assert 30 <= len(held_out) <= 90  # 60 expected, standard deviation 7


def test_adding_a_file_does_not_move_others(tmp_path):
    write(tmp_path, numbered(100))
    source = TextFiles(pattern='**/*.txt', root=str(tmp_path), holdout_percent=20)
    before = documents_of_both_parts(source, tmp_path / 'cache')
    write(tmp_path, {f'part1/new{i}.txt': f'<new {i}>'.encode() for i in range(50)})
    after = documents_of_both_parts(source, tmp_path / 'cache')
    assert all(set(old) < set(new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize('written', ['./**/*.txt', 'part0/../**/*.txt', '{root}/**/*.txt'])
def test_equivalent_patterns_give_the_same_split(tmp_path, written):
    write(tmp_path, numbered(60))
    patterns = ['**/*.txt', written.format(root=tmp_path)]
    plain, other, together = (
        documents_of_both_parts(
            TextFiles(pattern=p, root=str(tmp_path), holdout_percent=20), tmp_path / 'cache'
        )
        for p in (patterns[0], patterns[1], patterns)
    )
    assert other == plain
    assert together == plain, 'a file is in both parts, or twice in one'


def test_a_larger_percentage_holds_out_a_superset(tmp_path):
    write(tmp_path, numbered(200))
    small, large = (
        documents_of_both_parts(
            TextFiles(pattern='**/*', root=str(tmp_path), holdout_percent=p), tmp_path / 'c'
        )[1]
        for p in (10, 30)
    )
    assert set(small) < set(large)


@pytest.mark.parametrize('percent', [0, 0.01, 0.5, 20, 99.5, 100])
def test_the_held_out_share_is_about_the_percentage(percent):
    # Large corpora hold out small shares: 0.001 percent of 100 million documents is a thousand.
    count = 100_000
    source = TextFiles(pattern='*', holdout_percent=percent)
    held_out = sum(source.is_held_out(f'corpus/part.jsonl:{i}') for i in range(count))
    expected = count * percent / 100
    deviation = math.sqrt(expected * (1 - percent / 100))
    assert abs(held_out - expected) <= 5 * deviation


def test_the_current_directory_does_not_affect_absolute_patterns(tmp_path, monkeypatch):
    write(tmp_path / 'texts', {f'{i}.txt': b'%d' % i for i in range(40)})
    hashes = set()
    for folder in ('texts', 'elsewhere', 'elsewhere/below'):
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        source = TextFiles(pattern=str(tmp_path / 'texts/*.txt'), holdout_percent=30)
        hashes.add(index_of(source, tmp_path / 'cache').content_hash)
    assert len(hashes) == 1
    assert len([p for p in (tmp_path / 'cache').iterdir() if p.is_dir()]) == 1, 'and one index'
