"""T5X's settings, by its names, translated to this trainer's: gin files change their imports only.

| T5X                                        | here                                       |
|--------------------------------------------|--------------------------------------------|
| `import __main__ as train_script`          | `from train.t5x import train_script`       |
| `import __main__ as eval_script`           | `from train.t5x import eval_script`        |
| `import seqio`                             | `from train.t5x import seqio`              |
| `from t5x import partitioning`             | `import partitioning`                      |
| `from t5x import utils`                    | `from train.t5x import configs as utils`   |
| `from t5x import X`                        | `from train.t5x import X`                  |
| `from t5x.examples.decoder_only import network` | `from train.t5x import network`       |

Every setting is honoured, or refused with what to write; those of configs/t5x/MIGRATION.md differ.
"""
