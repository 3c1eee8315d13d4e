"""From streams of tokens to rows: tasks, how their rows are made, and the order they come in."""
