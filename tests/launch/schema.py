"""What a JobSet may hold, by the reference of jobset.x-k8s.io/v1alpha2; child jobs are left to Kubernetes' schema."""


def _object(required: list[str], **properties) -> dict:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
_COUNT = {"type": "integer", "minimum": 0}
_STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
_REASONS = [
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
]
_RULE = _object(
    ["name", "action"],
    name={"type": "string", "pattern": "^[A-Za-z]([_A-Za-z0-9,:]*[_A-Za-z0-9])?$"},
    action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
    onJobFailureReasons={"type": "array", "items": {"enum": _REASONS}},
    targetReplicatedJobs={"type": "array", "items": _NAME},
)
JOBSET = _object(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=_object(["name"], name=_NAME, namespace=_NAME, labels=_STRINGS, annotations=_STRINGS),
    spec=_object(
        ["replicatedJobs"],
        failurePolicy=_object([], maxRestarts=_COUNT, rules={"type": "array", "items": _RULE}),
        replicatedJobs={
            "type": "array",
            "minItems": 1,
            "items": _object(
                ["name", "template"], name=_NAME, replicas=_COUNT, template=_object(["spec"], spec={"type": "object"})
            ),
        },
    ),
)
