"""SkyPilot's and Kubernetes' parsers and schemas, where installed, accept the SkyPilot and Kubernetes examples."""

from pathlib import Path

import pytest
import yaml

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def unknown_keys(given, parsed, path=""):
    """Return the keys of a document that are missing after parsing, because the schema does not know them."""
    if isinstance(given, dict):
        return [key for name, value in given.items() for key in _unknown_key(name, value, parsed, path)]
    if isinstance(given, list):
        pairs = enumerate(zip(given, parsed, strict=True))
        return [key for number, (one, read) in pairs for key in unknown_keys(one, read, f"{path}[{number}]")]
    return []


def _unknown_key(name, value, parsed, path):
    if name not in parsed:
        return [f"{path}.{name}"]
    return unknown_keys(value, parsed[name], f"{path}.{name}")


def test_skypilot_reads_its_task(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))  # SkyPilot writes there
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml(str(RECIPES / "skypilot.yaml"))
    [resources] = task.resources
    assert task.num_nodes == 2 and resources.accelerators == {"H100": 8}
    assert task.volumes == {"/runs": "hf-fsdp-runs"} and "recipes/sft.py" in task.run


def test_kubernetes_example_has_only_keys_of_its_schemas():
    models = pytest.importorskip("kubeflow_trainer_api.models")
    schemas = {"TrainingRuntime": models.TrainerV1alpha1TrainingRuntime, "TrainJob": models.TrainerV1alpha1TrainJob}
    documents = list(yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text()))
    assert [document["kind"] for document in documents] == ["TrainingRuntime", "TrainJob"]
    for document in documents:
        parsed = schemas[document["kind"]].from_dict(document)
        assert unknown_keys(document, parsed.to_dict()) == []


def test_pods_of_the_kubernetes_example_are_valid():
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    runtime, _ = yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text())
    [job] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    document = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, "spec": job["template"]["spec"]}
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
