"""The pages in docs/launch, as far as a CPU can check them: shell, YAML, options, and the script's requeueing."""

import importlib.metadata
import itertools
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from jagg_jax.training.cli import load_command, parse_options, split_command
from jagg_jax.training.config import TrainConfig, validate

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs" / "launch").glob("*.md"))
PLACEHOLDERS = {"$(PROCESS_ID)": "1"}  # what the scheduler fills in -> a value for the check


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / "launch" / f"{page}.md").read_text()
    return [
        body for kind, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE) if kind == language
    ]


def manifests(kind: str) -> list[dict]:
    documents = [document for block in blocks("gke", "yaml") for document in yaml.safe_load_all(block)]
    return [document for document in documents if document["kind"] == kind]


def parse(command: str) -> TrainConfig:
    """The settings that `python train.py COMMAND` would run with, validated."""
    for placeholder, value in PLACEHOLDERS.items():
        command = command.replace(placeholder, value)
    name, options = split_command(command.split())
    config = parse_options(name, load_command(name).default, options)
    validate(config)
    return config


def shell_commands(page: str) -> list[TrainConfig]:
    script = "\n".join(blocks(page, "bash")).replace("\\\n", " ")
    return [parse(options) for options in re.findall(r"train\.py((?: +[^\s'\">&|;]+)+)", script)]


def pod(jobset: dict) -> tuple[dict, dict]:
    """The job's spec and the pod's spec of a JobSet of one replicated job."""
    (replicated,) = jobset["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1
    job = replicated["template"]["spec"]
    return job, job["template"]["spec"]


def assert_fits(config: TrainConfig, devices: int) -> None:
    """A preemptible run of several processes whose mesh takes all devices and splits the batch evenly."""
    assert config.resume
    assert config.distributed != "none"
    assert config.run_dir
    assert config.checkpoint_every > 0
    assert config.data == -1
    assert devices % (config.fsdp * config.tensor) == 0
    for size in (config.batch_size, config.micro_batch_size):
        assert size % (devices // config.tensor) == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_shell_blocks_parse(page):
    languages = re.findall(r"^```(\w+)$", page.read_text(), re.MULTILINE)
    assert set(languages) <= {"bash", "yaml", "dockerfile"}
    shell = blocks(page.stem, "bash")
    assert shell
    remote = [command for block in shell for _, command in re.findall(r"--command=(['\"])(.*?)\1", block, re.DOTALL)]
    for script in [*shell, *remote]:
        checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_say_what_never_ran_and_link_to_files(page):
    text = page.read_text()
    assert "Never run: " in text.split("\n\n")[1].replace("\n", " ")
    for target in re.findall(r"\]\((?!http)([^)]+)\)", text):
        assert (page.parent / target).is_file(), target


def test_every_jax_that_is_installed_there_exists():
    extras = set(importlib.metadata.metadata("jax").get_all("Provides-Extra"))
    named = set(itertools.chain(*(re.findall(r"jax\[(\w+)\]", page.read_text()) for page in PAGES)))
    assert {"tpu", "cuda12"} <= named <= extras


def test_slurm_script_is_one_task_a_gpu_and_its_options_are_valid():
    (script,) = [block for block in blocks("slurm", "bash") if block.startswith("#!")]
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script, re.MULTILINE))
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert re.fullmatch(r"TERM@\d+", options["signal"])
    assert options["open-mode"] == "append"
    assert "#SBATCH --requeue\n" in script
    (config,) = shell_commands("slurm")
    assert config.distributed == "auto"
    assert_fits(config, int(options["nodes"]) * int(options["gpus-per-node"]))


@pytest.mark.parametrize(("status", "requeued"), [(0, False), (1, False), (2, False), (143, True)])
def test_slurm_script_requeues_itself_after_a_saved_stop_only(tmp_path, status, requeued):
    """The script runs with stand-ins for SLURM's two commands, the first of which ends as the tasks would."""
    (script,) = [block for block in blocks("slurm", "bash") if block.startswith("#!")]
    for name, body in {"srun": f"exit {status}", "scontrol": 'echo "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    ended = subprocess.run(["bash"], input=script, capture_output=True, text=True, env=environment)
    assert ended.returncode == status
    assert ended.stdout == ("requeue 17\n" if requeued else "")


def test_tpu_pod_options_are_valid():
    (chips,) = re.findall(r"--accelerator-type=v5litepod-(\d+)", "".join(blocks("tpu_pod", "bash")))
    (config,) = shell_commands("tpu_pod")
    assert config.distributed == "auto"
    assert_fits(config, int(chips))


@pytest.mark.parametrize("name", ["jagg-tpu", "jagg-gpu"])
def test_jobsets_restart_all_processes_but_not_after_a_mistake(name):
    (jobset,) = [jobset for jobset in manifests("JobSet") if jobset["metadata"]["name"] == name]
    job, spec = pod(jobset)
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    policy = jobset["spec"]["failurePolicy"]
    assert policy["maxRestarts"] > 0
    assert policy["rules"] == [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]
    assert (job["completionMode"], job["backoffLimit"], spec["restartPolicy"]) == ("Indexed", 0, "Never")
    assert job["parallelism"] == job["completions"]
    assert spec["terminationGracePeriodSeconds"] >= 60
    (rule,) = job["podFailurePolicy"]["rules"]
    (container,) = spec["containers"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [2]}


@pytest.mark.parametrize("name", ["jagg-tpu", "jagg-gpu"])
def test_jobsets_run_valid_options_on_the_shared_volume(name):
    (jobset,) = [jobset for jobset in manifests("JobSet") if jobset["metadata"]["name"] == name]
    job, spec = pod(jobset)
    (container,), (volume,), (claim,) = spec["containers"], spec["volumes"], manifests("PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/runs"}]
    (chips,) = container["resources"]["limits"].values()
    config = parse(" ".join(container["args"]))
    assert config.run_dir.startswith("/runs/")
    assert_fits(config, job["parallelism"] * chips)
    if config.distributed == "manual":
        (replicated,) = jobset["spec"]["replicatedJobs"]
        assert jobset["spec"]["network"]["enableDNSHostnames"]
        assert config.coordinator.split(":")[0] == f"{name}-{replicated['name']}-0-0.{name}"
        assert config.num_processes == job["parallelism"]
        (variable,) = container["env"]
        assert f"--process-id=$({variable['name']})" in container["args"]
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        assert variable["valueFrom"] == {"fieldRef": {"fieldPath": index}}


def test_the_slice_is_the_node_pool_that_was_made():
    (tpu,) = [jobset for jobset in manifests("JobSet") if jobset["metadata"]["name"] == "jagg-tpu"]
    job, spec = pod(tpu)
    (pool,) = [block for block in blocks("gke", "bash") if "node-pools create" in block]
    topology, nodes = re.search(r"--tpu-topology=(\S+) --num-nodes=(\d+)", pool).groups()
    rows, columns = map(int, topology.split("x"))
    assert spec["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == topology
    assert job["parallelism"] == int(nodes)
    assert rows * columns == int(nodes) * spec["containers"][0]["resources"]["limits"]["google.com/tpu"]


def test_the_image_installs_the_requirements_and_starts_python_itself():
    (image,) = blocks("gke", "dockerfile")
    instructions = dict(re.findall(r"^(FROM|ENTRYPOINT|RUN) (.*)$", image, re.MULTILINE))
    assert re.fullmatch(r"python:3\.1[1-9]-slim", instructions["FROM"])
    assert json.loads(instructions["ENTRYPOINT"]) == ["python", "train.py"]
    assert "-r requirements.txt" in instructions["RUN"]
    assert (ROOT / "requirements.txt").is_file()
