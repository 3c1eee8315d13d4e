"""Attention behind one function, computed in the way that suits the machine."""

from train.attention.choosing import attend as attend
from train.attention.settings import (
    AttentionSettings as AttentionSettings,
    SplashBlocks as SplashBlocks,
)
from train.attention.sight import Sight as Sight
