"""Translates T5X's settings, under T5X's names, to settings of this trainer.

T5X's gin files run as they are: `train.t5x.modules` maps the names that they use to names of this
package. Every setting is honoured, or refused with one line that says what to write instead.
`python -m train.t5x report FILE.gin ...` lists the translation of each setting.
"""
