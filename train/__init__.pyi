"""The names of `train`, each with the module that has it; `train/__init__.py` reads this file."""

from train.config import TrainConfig as TrainConfig
from train.evaluators.held_out import HeldOut as HeldOut
from train.evaluators.samples import Samples as Samples
from train.models.quantized import QuantizedProducts as QuantizedProducts, quantize as quantize
from train.objectives import (
    EncoderDecoder as EncoderDecoder,
    Loss as Loss,
    NextToken as NextToken,
    Objective as Objective,
    PrefixLanguageModel as PrefixLanguageModel,
    Supervised as Supervised,
)
from train.optimizers import Optimizer as Optimizer
from train.processes.signals import Interrupted as Interrupted
from train.running.evaluation import evaluate as evaluate
from train.running.stopping import (
    EarlyStopping as EarlyStopping,
    StopIfNotFinite as StopIfNotFinite,
)
from train.running.training import train as train
