"""GKE: a JobSet (jobset.x-k8s.io/v1alpha2) whose child jobs are slices of TPUs, or one group of GPU hosts."""

from __future__ import annotations

from typing import Any

import yaml

from launch.job import PORT, RETRIED, Job, worker
from launch.topology import LaunchError

SLICE, CONTAINER = "slice", "train"  # names of the child jobs and of their container


def manifest(job: Job, image: str, claim: str, namespace: str = "default", spot: bool = False) -> dict[str, Any]:
    """The JobSet. claim: `NAME:PATH`, a persistent volume claim and where pods see it; the workdir lies there.

    A pod that leaves with a code that is retried fails its job, which restarts the whole JobSet, up to job.retries
    times; any other code fails the JobSet for good. Raises LaunchError.
    """
    volume, _, path = claim.partition(":")
    if not volume or not path.startswith("/"):
        raise LaunchError(f"--claim={claim}: write NAME:/PATH, a persistent volume claim and where pods see it")
    if not f"{job.workdir}/".startswith(f"{path.rstrip('/')}/"):
        raise LaunchError(f"--workdir={job.workdir} lies outside of {path}: a pod's own disk is lost with the pod")
    family = job.topology.of
    chips = {("google.com/tpu" if family.tpu else "nvidia.com/gpu"): family.per_host}
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace,
        "hostNetwork": True,  # the network between hosts at its full speed
        "dnsPolicy": "ClusterFirstWithHostNet",
        "nodeSelector": _nodes(job, spot),
        "tolerations": [{"operator": "Exists", "effect": "NoSchedule", "key": key} for key in chips],
        "containers": [
            {
                "name": CONTAINER,
                "image": image,
                "command": ["bash", "-c", script(job)],
                "env": [_label("JOB_INDEX", "jobset.sigs.k8s.io/job-index")],
                "ports": [{"containerPort": port} for port in ((8471, 8080, PORT) if family.tpu else (PORT,))],
                "resources": {"requests": dict(chips), "limits": dict(chips)},
                "volumeMounts": [{"name": "runs", "mountPath": path}],
            }
        ],
        "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": volume}}],
    }
    if spot:
        pod["tolerations"].append({"operator": "Exists", "effect": "NoSchedule", "key": "cloud.google.com/gke-spot"})
    codes = {"containerName": CONTAINER, "operator": "NotIn", "values": list(RETRIED)}
    child = {
        "completionMode": "Indexed",
        "parallelism": job.topology.hosts,
        "completions": job.topology.hosts,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": codes}]},
        "template": {"spec": pod},
    }
    metadata: dict[str, Any] = {"name": job.name, "namespace": namespace}
    if family.tpu:  # a child job to itself on a slice's node pool
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": {
                "maxRestarts": job.retries,
                "rules": [{"name": "errors", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [{"name": SLICE, "replicas": job.slices, "template": {"spec": child}}],
        },
    }


def script(job: Job) -> str:
    """What a pod runs. Job controllers set JOB_COMPLETION_INDEX; the first pod's name is its address."""
    return "set -eu\n" + worker(job, f"{job.name}-{SLICE}-0-0.{job.name}", "$JOB_INDEX", "$JOB_COMPLETION_INDEX")


def render(manifest: dict[str, Any]) -> str:
    return yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=120)


def _nodes(job: Job, spot: bool) -> dict[str, str]:
    label = "cloud.google.com/gke-tpu-accelerator" if job.topology.of.tpu else "cloud.google.com/gke-accelerator"
    nodes = {label: job.topology.of.gke}
    if job.topology.of.tpu:
        nodes["cloud.google.com/gke-tpu-topology"] = job.topology.shape
    return nodes | ({"cloud.google.com/gke-spot": "true"} if spot else {})


def _label(variable: str, label: str) -> dict[str, Any]:
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}}


class _Dumper(yaml.SafeDumper):
    """Scripts as blocks, so that a person can read them."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)
