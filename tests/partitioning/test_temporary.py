"""Temporary folders are removed, if need be when the next one is made."""

import tempfile

from partitioning.temporary import temporary_folder


def test_a_folder_that_a_killed_process_left_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    for name in ('mine-left', 'mine-without-a-lock', 'other-left'):
        (tmp_path / name / 'inside').mkdir(parents=True)
    for name in ('mine-left', 'other-left'):
        (tmp_path / f'{name}.lock').touch()  # no process holds it
    with temporary_folder('mine-') as first, temporary_folder('mine-') as second:
        (first / 'a').touch()
        assert first != second and first.exists() and second.exists()
        assert not (tmp_path / 'mine-left').exists()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {'mine-without-a-lock', 'other-left', 'other-left.lock'}
