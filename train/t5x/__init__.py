"""T5X's settings under T5X's names, translated to this trainer's settings.

A gin file of T5X needs other imports here, and no other change:

| T5X                                        | here                                       |
|--------------------------------------------|--------------------------------------------|
| `import __main__ as train_script`          | `from train.t5x import train_script`       |
| `import __main__ as eval_script`           | `from train.t5x import eval_script`        |
| `import seqio`                             | `from train.t5x import seqio`              |
| `from t5x import partitioning`             | `import partitioning`                      |
| `from t5x import utils`                    | `from train.t5x import configs as utils`   |
| `from t5x import X`                        | `from train.t5x import X`                  |
| `from t5x.examples.decoder_only import network` | `from train.t5x import network`       |

Every setting is honoured, or refused with a message that says what to write instead. Settings that
mean something different here are listed in configs/t5x/MIGRATION.md.
"""
