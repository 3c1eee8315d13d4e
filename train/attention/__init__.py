"""One function for attention, which chooses the implementation that suits the machine."""

from train.attention.choosing import attend as attend
from train.attention.settings import (
    AttentionSettings as AttentionSettings,
    SplashBlocks as SplashBlocks,
)
from train.attention.sight import Sight as Sight
