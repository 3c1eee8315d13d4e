"""The model of a run, from its gin configuration alone: without its devices and its data."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import gin

from train.gin.load import load_config


def find_model(text: str) -> Any:
    """Returns the settings of the model that a gin file configures.

    Args:
      text: the text of the file, such as that of the `config.gin` of a run.

    Returns:
      The `config` of the model, or None if the file configures no objective with such a model.

    Raises:
      ConfigError: if the file is invalid.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / 'config.gin'
        file.write_text(text)
        load_config([str(file)])
    settings = gin.get_bindings('train.config.TrainConfig', resolve_references=False)
    # gin calls what a reference names when it copies the reference.
    objective = copy.deepcopy(settings.get('objective'))
    return getattr(getattr(objective, 'model', None), 'config', None)
