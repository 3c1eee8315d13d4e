"""What a traced function says without a compiler: its floating-point operations."""
