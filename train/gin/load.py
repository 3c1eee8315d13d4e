"""Loads a gin configuration from files and flags, checks types, and finds what it configures."""

from __future__ import annotations

import builtins
import copy
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import gin
from gin import config as gin_internals, config_parser

from train.errors import ConfigError, first_line
from train.gin import checks, parsing
from train.gin.configurables import parameters_of, register
from train.gin.parsing import Statement, follow_macros, is_within, parse, read_statements
from train.gin.selectors import NO_ALIASES, Aliases, Resolver, is_import

# Words in the types of parameters that take numbers, and words of types that take texts.
_NUMBERS = {'int', 'float', 'ArrayLike', 'Numeric', 'ScalarOrSchedule', 'Scalar'}
_TEXTS = {'str', 'Any', 'Literal', 'PathLike', 'object', 'Mapping', 'dict'}


def check_types(statements: Sequence[Statement], resolver: Resolver) -> None:
    """Checks that texts, fractions and references are not given to parameters that take others.

    Only what the signature of a configurable says is compared. Raises a ConfigError if a value has
    another type than its parameter. It names the file and line, or the flag, of the value.
    """
    macros = {s.macro: s for s in statements if s.macro}
    last: dict[tuple[str, str, str], Statement] = {}
    for statement in statements:
        if statement.is_binding:
            parsed = statement.parsed
            last[parsed.scope, parsed.selector, parsed.arg_name] = statement
    for statement in last.values():
        parsed = statement.parsed
        assert isinstance(parsed, config_parser.BindingStatement)
        source = follow_macros(statement, macros)
        value = source.parsed.value
        if not isinstance(value, str | float | parsing.Reference | list | tuple | dict):
            continue
        configurable = resolver.resolve(parsed.selector, statement)
        parameter = parameters_of(configurable).get(parsed.arg_name) if configurable else None
        if parameter is None:
            continue
        if isinstance(value, str | float):
            shown, wanted = repr(value), _wanted(value, parameter)
        else:
            kind = _class_of(parameter, configurable.wrapped)
            shown, made = _made_by(value, source, resolver)
            misfits = kind is not None and made is not None and not issubclass(made, kind)
            wanted = _NAMES.get(kind, f'a {kind.__name__}') if kind and misfits else ''
        if wanted:
            raise ConfigError(
                f'{source.place}: {parsed.selector}.{parsed.arg_name} is {shown}: it must be '
                f'{wanted}'
            )


_NAMES: dict[type | None, str] = {
    bool: 'True or False',
    int: 'an integer',
    float: 'a number',
    str: 'a text',
}


def _class_of(parameter: inspect.Parameter, function: Any) -> type | None:
    """The class that a parameter takes, if its type is the name of one of ours or in `_NAMES`."""
    hint = parameter.annotation
    if isinstance(hint, str) and hint.isidentifier():
        module = vars(sys.modules[function.__module__])
        hint = module.get(hint, getattr(builtins, hint, None))
    if not isinstance(hint, type) or getattr(hint, '_is_protocol', False):
        return None
    # The translation of T5X's files says more about its own classes.
    is_ours = hint.__module__.startswith('train.') and not is_within(hint.__module__, ['train.t5x'])
    return hint if hint in _NAMES or is_ours else None


def _made_by(value: Any, statement: Statement, resolver: Resolver) -> tuple[str, type | None]:
    """A value as text, and the class of what gin makes of it, if that is known.

    The users' own classes may stand for any other, so nothing is known of them.
    """
    if not isinstance(value, parsing.Reference):
        return f'a {type(value).__name__}', type(value)
    found = None if value.is_macro else resolver.resolve(value.selector, statement)
    if found is None or found.wrapped.__module__.partition('.')[0] != 'train':
        return '', None
    shown = f'@{value.name}{"()" * value.evaluate}'
    if not value.evaluate:
        return shown, type(found.wrapped)
    return shown, found.wrapped if isinstance(found.wrapped, type) else None


def _wanted(value: str | float, parameter: inspect.Parameter) -> str:
    """What a parameter takes in place of a value, or '' if it may take the value."""
    default, hint = parameter.default, parameter.annotation
    text = '' if hint is parameter.empty else inspect.formatannotation(hint)
    words = set(re.findall(r'\w+', text))
    kinds = words - {'None', 'Optional', 'typing', 'jax', 'optax', 'base', 'chex'}
    or_none = ' or None' if 'None' in words or 'Optional' in words else ''
    if isinstance(value, float):
        return f'an integer{or_none}' if kinds == {'int'} and value % 1 else ''
    if kinds == {'bool'} or (not kinds and isinstance(default, bool)):
        return f'True or False{or_none}'
    if kinds == {'int'}:
        return f'an integer{or_none}'
    is_number = isinstance(default, int | float) and not isinstance(default, bool)
    takes_numbers = bool(kinds & _NUMBERS) if kinds else is_number
    takes_texts = isinstance(default, str) or kinds & _TEXTS
    return f'a number{or_none}' if takes_numbers and not takes_texts else ''


def load_config(
    files: Sequence[str],
    bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    allow: Sequence[str] = (),
    aliases: Aliases = NO_ALIASES,
) -> None:
    """Reads gin files and flags, checks them, and configures gin with them.

    Raises a ConfigError if a file, a statement or a flag is invalid. gin has not run anything then.

    Args:
      files: gin files. Later files override earlier ones.
      bindings: `NAME=value` or `configurable.parameter=value`. They override the files.
      search_paths: directories in which files and their includes are searched, after the current
        directory and before the directory that contains `configs/`.
      allow: packages that gin files may use in addition to the listed names.
      aliases: names of another system that gin files may use.
    """
    if not files:
        raise ConfigError('no gin file: add --gin_file=configs/runs/quickstart.gin')
    configure(read_statements(files, bindings, search_paths), allow, aliases)


def configure(
    statements: Sequence[parsing.Statement],
    allow: Sequence[str] = (),
    aliases: Aliases = NO_ALIASES,
) -> None:
    """Checks statements, and configures gin with them; see `load_config`."""
    checks.import_modules(statements, allow, aliases)
    resolver = checks.check_names(statements, allow, aliases)
    check_types(statements, resolver)
    parsing.remember(statements)
    parsing.allow_packages(allow)
    for statement in statements:
        try:
            _bind(statement, resolver)
        except Exception as error:  # the checks above missed it, so the message is gin's own
            raise ConfigError(f'{statement.place}: gin: {first_line(error)}') from error
    if aliases.adjust is not None:
        aliases.adjust(statements)
    try:
        gin.finalize()
    except Exception as error:
        raise ConfigError(f'gin: {first_line(error)}') from error


def _bind(statement: parsing.Statement, resolver: Resolver) -> None:
    """Gives gin the value that a statement sets."""
    parsed, aliases = statement.parsed, resolver.aliases
    if statement.is_dynamic:
        gin_internals._IMPORTS.add(parsed)
    elif is_import(statement):
        if not aliases.covers(parsed.module) or is_within(parsed.module, resolver.allow):
            gin_internals._IMPORTS.add(parsed)
    elif statement.macro:
        value = _resolved(parsed.value, statement, resolver)
        gin.bind_parameter((statement.macro, 'gin.macro', 'value'), value)
    elif statement.is_binding:
        configurable = resolver.resolve(parsed.selector, statement)
        name = configurable.selector if configurable else parsed.selector
        if configurable and (why := checks.is_gone(configurable, parsed.arg_name, aliases)):
            parsing.print_note(
                f'{statement.place}: {parsed.selector}.{parsed.arg_name} is gone: {why}'
            )
            return
        value = _resolved(parsed.value, statement, resolver)
        gin.bind_parameter((parsed.scope, name, parsed.arg_name), value)


def _resolved(value: Any, statement: parsing.Statement, resolver: Resolver) -> Any:
    """The value with gin's references to configurables and macros."""
    if isinstance(value, dict):
        return {
            _resolved(key, statement, resolver): _resolved(part, statement, resolver)
            for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(_resolved(part, statement, resolver) for part in value)
    if not isinstance(value, parsing.Reference):
        return value
    if value.is_macro:
        return gin_internals.ParserDelegate().macro(value.name)
    configurable = resolver.resolve(value.selector, statement)
    name = configurable.selector if configurable else value.selector
    scopes = value.name[: -len(value.selector)]
    return gin_internals.ConfigurableReference(f'{scopes}{name}', value.evaluate)


ENTRY_POINTS = (
    'train.running.training.train',
    'train.running.evaluation.evaluate',
    'train.t5x.train_script.train',
    'train.t5x.train_script.precompile',
    'train.t5x.eval_script.evaluate',
    'train.t5x.infer_script.infer',
    'train.t5x.export_lib.save',
)
_NO_RUN = (
    'the gin files describe no run, and so no model: begin with a run, such as '
    'configs/runs/pretrain.gin, or write train.config = @TrainConfig()'
)


def find_entry() -> Callable[..., Any]:
    """Returns the entry point whose parameters the configuration sets.

    Raises a ConfigError if the configuration sets parameters of none or of several entry points.
    """
    bound = {selector for _, selector in gin_internals._CONFIG}
    configured = [name for name in ENTRY_POINTS if name in bound]
    if len(configured) > 1:
        raise ConfigError(
            f'the gin files configure {" and ".join(configured)}, but a command runs only one of '
            'them: remove the settings of the others'
        )
    if not configured:
        raise ConfigError(_NO_RUN)
    return register(configured[0]).wrapper


def find_config() -> Any:
    """Returns the `TrainConfig` that the configuration describes, without starting the run.

    Raises a ConfigError if the configuration does not describe a complete training run.
    """
    entry = find_entry()
    settings, name = gin.get_bindings(entry), f'{entry.__module__}.{entry.__name__}'
    if 'config' in settings:
        return settings['config']
    if name == ENTRY_POINTS[0]:
        raise ConfigError(_NO_RUN)
    # A run with T5X's settings.
    translate = getattr(sys.modules[entry.__module__], 'translate', None)
    if translate is None:
        raise ConfigError(f'{name} is configured, which trains nothing')
    try:
        arguments = inspect.signature(entry).bind(**settings)
    except TypeError as error:
        raise ConfigError(f'{name}: {error}: set it in a gin file') from error
    arguments.apply_defaults()
    return translate(arguments.arguments)


def find_model(text: str, aliases: Aliases = NO_ALIASES) -> Any:
    """Returns the settings of the model that a gin file configures, without using devices or data.

    Returns the `config` of the model, or None if the file does not configure a model that has one.
    Raises a ConfigError if the file is invalid.
    """
    configure(parse(text, 'config.gin'), aliases=aliases)
    # By its name, because the file may have registered the class once more.
    trainer = register('train.config.TrainConfig').selector
    settings = gin.get_bindings(trainer, resolve_references=False)
    # When gin copies a reference, it calls the function that the reference names.
    objective = copy.deepcopy(settings.get('objective'))
    return getattr(getattr(objective, 'model', None), 'config', None)
