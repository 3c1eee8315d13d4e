"""The built-in models. Every parameter and activation has logical axes."""
