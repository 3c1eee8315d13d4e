"""The contract for programs: the schema has every entry, and refuses what breaks the contract."""

import dataclasses

import pytest
from contract import check_answers, schema_of_the_dataclasses
from forecasts_by_hand import make_forecast

from meshwright import Forecast, answer_schema
from meshwright.report.answers import answer_of, exit_status, fit_together, write_answers


def made(**changes):
    return dataclasses.replace(answer_of(make_forecast()), **changes)


def test_the_schema_describes_every_entry():
    definitions = schema_of_the_dataclasses()
    assert answer_schema()['$defs'] == definitions
    assert {
        'answer',
        'exchange',
        'cause',
        'effect',
        'time',
        'change',
        'finding',
        'sent',
    } == {*definitions}


def test_an_answer_has_the_figures_of_its_forecast():
    document = write_answers('forecast', [made()], {'more': 1})
    check_answers(document)
    [answer] = document['answers']
    assert (answer['machine'], answer['num_devices'], answer['peak']) == (
        'v5p:4x4x4',
        64,
        7.5 * 2**30,
    )
    assert answer['sent'][0] == {
        'kind': 'all-gather',
        'axes': ['fsdp'],
        'network': 'ici',
        'bytes': 48_000_000_000,
        'count': 96,
    }
    assert answer['exchanges'][0]['cause']['why'] and document['versions']['jax']
    assert document['details'] == {'more': 1}
    again = Forecast.from_json(make_forecast().to_json())
    assert again.as_dict() == answer['details']


def test_several_slices_are_written_as_the_command_takes_them():
    assert answer_of(make_forecast(num_slices=2)).machine == '2xv5p:4x4x4'


@pytest.mark.parametrize(
    ('fits', 'together', 'status'),
    [
        ([], None, 0),
        ([True, True], True, 0),
        ([True, None], None, 0),
        ([None, False, True], False, 1),
    ],
)
def test_the_exit_status_says_whether_all_fit(fits, together, status):
    answers = [made(fits=one) for one in fits]
    assert fit_together(fits) is together
    assert exit_status(answers) == status
    assert write_answers('fits', answers)['fits'] is together


@pytest.mark.parametrize(
    'changes', [{'peak': '7.50 GiB'}, {'sent': None}, {'mesh': {'data': 'x'}}, {'chip': 5}]
)
def test_a_broken_answer_is_refused(changes):
    jsonschema = pytest.importorskip('jsonschema')
    with pytest.raises(jsonschema.ValidationError):
        check_answers(write_answers('dry', [made(**changes)]))
