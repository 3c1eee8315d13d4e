"""What is done with checkpoints without a run: inspecting, comparing and converting them."""
