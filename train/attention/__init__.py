"""Computes attention by one function, with the implementation that suits the machine."""

from train.attention.choosing import attend as attend
from train.attention.sight import (
    AttentionSettings as AttentionSettings,
    Sight as Sight,
    SplashBlocks as SplashBlocks,
)
