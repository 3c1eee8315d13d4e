"""The `config.json` of a model by its name on a hub of Hugging Face, such as `Qwen/Qwen3-8B`."""

from __future__ import annotations

import os
import re
import shlex
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from partitioning.untrusted_text import parse_json
from train.checkpoints.huggingface.config_json import FILE, MAX_BYTES, ConfigJson
from train.errors import ConfigError, first_line

_HUB = 'https://huggingface.co'
_SECONDS = 10.0  # The longest time to wait for the hub.


def is_hub_name(text: str) -> bool:
    """Whether a text can be the name of a model on a hub: OWNER/NAME, or NAME of an old model."""
    is_name = re.fullmatch(r'[\w.-]+(/[\w.-]+)?', text) is not None
    return is_name and not text.startswith('.') and not text.endswith('.json')


def read_config_of_hub(name: str) -> ConfigJson:
    """Reads the settings of a model on the hub. Nothing else is loaded, and nothing is kept.

    HF_ENDPOINT and HF_TOKEN mean what they mean to Hugging Face's own tools. `name` is the name of
    the model. Raises a ConfigError if the hub cannot be reached, or has no such model. It says what
    to do.
    """
    hub = os.environ.get('HF_ENDPOINT', _HUB).rstrip('/')
    where = f'{hub}/{urllib.parse.quote(name)}/resolve/main/{FILE}'
    request = urllib.request.Request(where, headers={'User-Agent': 'meshwright'})
    if token := _token():
        request.add_unredirected_header('Authorization', f'Bearer {token}')
    folder = name.rpartition('/')[2]
    command = shlex.join(['hf', 'download', name, FILE, '--local-dir', folder])
    advice = (
        f'download it where there is a network, with: {command}; then write the path of its '
        f'folder, {folder}'
    )
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            values = parse_json(answer.read(MAX_BYTES))
        if not isinstance(values, dict):
            raise ValueError('it is no JSON object')
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise ConfigError(
                f'{hub} does not give out the {FILE} of {name!r} (HTTP {error.code}): it does not '
                'exist, or needs an account that may read it; set HF_TOKEN, or ' + advice
            ) from error
        raise ConfigError(
            f'{hub} has no {FILE} of {name!r} (HTTP {error.code}): write OWNER/NAME as on the hub, '
            'or the path of a config.json'
        ) from error
    except (OSError, ValueError) as error:
        why = first_line(getattr(error, 'reason', None) or error)
        raise ConfigError(
            f'there is no file {name!r}, and {hub} cannot be asked for a model of this name '
            f'({why}): {advice}'
        ) from error
    return ConfigJson(values, where)


def _token() -> str:
    """The user's token, from the environment or from the file of `hf auth login`."""
    if token := os.environ.get('HF_TOKEN', ''):
        return token.strip()
    home = os.environ.get('HF_HOME') or '~/.cache/huggingface'
    try:
        return Path(home, 'token').expanduser().read_text().strip()
    except OSError:
        return ''
