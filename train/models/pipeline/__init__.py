"""Runs layers in stages over a mesh axis, and passes microbatches from stage to stage.

`stages` has the settings, finds the mesh axis and checks all sizes. `weights` gives each stage its
layers, and `schedule` runs them.
"""

from train.models.pipeline.schedule import run_pipeline as run_pipeline
from train.models.pipeline.stages import Pipeline as Pipeline, find_stages as find_stages
