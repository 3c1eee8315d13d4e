"""Which machines a model of Hugging Face fits into, and how it runs there, without a compiler."""

from train.planning.fitting.fits import (
    Fit as Fit,
    Known as Known,
    confirm as confirm,
    fastest as fastest,
    fit_machine as fit_machine,
    write_fit as write_fit,
)
from train.planning.fitting.models import (
    FoundModel as FoundModel,
    find_model as find_model,
    read_model as read_model,
)
from train.planning.fitting.smallest import (
    find_smallest as find_smallest,
)
from train.planning.fitting.tasks import (
    Task as Task,
    make_task as make_task,
    parse_tokens as parse_tokens,
)
