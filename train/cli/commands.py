"""The commands of `meshwright`: the table that the command line reads."""

from __future__ import annotations

# The name of a command -> its function in train.cli, what it does, and an example.
COMMANDS = {
    'train': ('training.train', 'train a model, or resume a run', 'quickstart'),
    'launch': (
        'launch.start_processes',
        'start several processes of a run on this machine',
        '--processes=2 -- quickstart',
    ),
    'precompile': (
        'training.precompile',
        'compile the train step of a run, and say what it costs',
        'pretrain forecast',
    ),
    'forecast': (
        'forecasting.forecast',
        'say whether a run fits into any machine, and how fast it is there',
        'pretrain --topology=v5e:4x4',
    ),
    'dry': (
        'forwarded.run_dry',
        'run an untouched script as if a machine were there',
        'v5e:4x4 -- python train.py',
    ),
    'check': (
        'checking.check',
        'say what changed in the layouts of your programs',
        '--out=check',
    ),
    'radar': (
        'checking.radar',
        'say what releases of jax change in your programs',
        '--versions=jax==0.10.2,jax==0.11.2',
    ),
    'explain': (
        'forwarded.explain_dump',
        'say what a dump of XLA tells about a program',
        'dump --mesh=data=4,model=2',
    ),
    'fits': (
        'fitting.find_machines',
        'say on which machines a Hugging Face model can be trained',
        'config.json --topology=v5e:4x4',
    ),
    'eval': ('scoring.evaluate', 'score a run on held-out data', 'runs/quickstart'),
    'predict': (
        'scoring.predict',
        'write what a model predicts for every held-out example',
        'runs/translate --beams=4',
    ),
    'generate': (
        'scoring.generate',
        'continue prompts with a trained model',
        "runs/quickstart --prompt 'def ' --length=200",
    ),
    'checkpoint': (
        'checkpoint.main',
        'look into checkpoints, compare, verify and convert them',
        'inspect runs/quickstart',
    ),
    'configs': (
        'configs.show_configs',
        'list the shipped runs, models and layouts, or print one',
        'pretrain',
    ),
    'mesh': (
        'forwarded.show_mesh',
        'draw the mesh of this machine, or of any other',
        '--topology=v5p:4x4x4 --mesh=data=-1,model=8',
    ),
    'plan': (
        'forwarded.show_plan',
        'show the layout of every array of a run, or compare two',
        'diff runs/before runs/after',
    ),
}
