"""Settings of our model from the `config.json` of models that are like it, but not equal."""
