"""How long a step takes: what a device has to do, and how fast its chip and its links are."""

from partitioning.aot.timing.step_time import (
    Constant as Constant,
    StepTime as StepTime,
    TimePart as TimePart,
)
from partitioning.aot.timing.work import (
    KernelWork as KernelWork,
    Work as Work,
)
