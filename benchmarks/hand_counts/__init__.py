"""What train steps of shipped configurations need and send, counted by hand."""
