"""The contract for programs: its schema as the dataclasses have it, and checks of documents."""

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Mapping

from meshwright import answer_schema
from meshwright.report import answers

try:
    import jsonschema
except ModuleNotFoundError:  # the smallest environments check only the sums
    jsonschema = None

NAMES = {str: 'string', int: 'integer', float: 'number', bool: 'boolean'}
PREFIXES = re.compile('^(Answer|Memory|Forecast)')


def check_answers(document):
    """Checks a document by the schema, and that what it says together follows from its parts."""
    if jsonschema is not None:
        jsonschema.Draft202012Validator(answer_schema()).validate(document)
    fits = [answer['fits'] for answer in document['answers']]
    together = False if False in fits else None if None in fits or not fits else True
    assert document['fits'] is together
    for answer in document['answers']:
        if answer['peak'] is not None and answer['limit'] is not None:
            assert answer['fits'] == (answer['peak'] <= answer['limit'])
        assert sum(s['bytes'] for s in answer['sent']) == sum(
            e['bytes'] for e in answer['exchanges']
        )


def schema_of_the_dataclasses():
    """The definitions of the schema, from the fields, annotations and docstrings."""
    definitions = {}
    define_types(answers.Answer, definitions)
    return definitions


def define_types(kind, definitions):
    """Adds a dataclass and those in it to definitions of a schema; returns its name there."""
    name = PREFIXES.sub('', kind.__name__).lower() or 'answer'
    if name in definitions:
        return name
    definitions[name] = {}
    hints, said = typing.get_type_hints(kind), _described(kind)
    fields = [field.name for field in dataclasses.fields(kind)]
    definitions[name] = {
        'description': inspect.getdoc(kind).splitlines()[0],
        'type': 'object',
        'properties': {f: {'description': said[f], **_type(hints[f], definitions)} for f in fields},
        'required': fields,
    }
    return name


def _type(kind, definitions):
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        found = _type(next(one for one in inner if one is not type(None)), definitions)
        if 'allOf' in found:
            return {'anyOf': [*found['allOf'], {'type': 'null'}]}
        return {**found, 'type': [found['type'], 'null']}
    if dataclasses.is_dataclass(kind):
        return {'allOf': [{'$ref': f'#/$defs/{define_types(kind, definitions)}'}]}
    if origin is tuple:
        found = _type(inner[0], definitions)
        return {'type': 'array', 'items': found.get('allOf', [found])[0]}
    if origin is typing.Literal:
        return {'type': 'string', 'enum': list(inner)}
    if origin is not None and issubclass(origin, Mapping):
        values = {} if inner[1] is typing.Any else {'additionalProperties': _type(inner[1], {})}
        return {'type': 'object', **values}
    return {'type': NAMES[kind]}


def _described(kind):
    """What the docstring says about each field."""
    text = inspect.getdoc(kind).partition('Attributes:\n')[2]
    parts = re.split(r'^  (\w+): ', text, flags=re.M)[1:]
    return {n: ' '.join(said.split()) for n, said in zip(parts[::2], parts[1::2], strict=True)}
