"""The experts of a network, for gin files: T5X leaves such networks to its users.

The MLPs of a network become experts by one more setting of its configuration:

  from train.t5x import moe_network

  network.T5Config.experts = @moe_network.ExpertsConfig()
  moe_network.ExpertsConfig:
    num_experts = %NUM_EXPERTS
    num_selected_experts = 2
"""

from __future__ import annotations

from train.models.experts import ExpertsConfig as ExpertsConfig
