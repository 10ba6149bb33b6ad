"""Changes of rendered objects that have no setting: a strategic merge by kind."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from launch.environment import check_variables
from launch.k8s.manifest import ACTION_LABEL, CONTAINER, JOB_LABEL, Object
from samestep.errors import ConfigError

KINDS = ("ConfigMap", "NetworkPolicy", "Service", "Job", "JobSet", "Pod")
"""`Job` is also the template inside a JobSet, and `Pod` the template inside a Job."""

# The settings by which items of a list are the same, in order: volumeMounts have names,
# too, but one volume may be mounted at two paths.
_MERGE_KEYS = ("mountPath", "name")
_DIRECTIVE = "$patch"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check(patches: Mapping[str, Object], controller: str) -> None:
    """Rejects kinds that are never rendered, unknown directives, and secrets.

    Args:
        controller: jobset or job.

    Raises:
        ConfigError: naming the place in the patch.
    """
    absent = "Service" if controller == "jobset" else "JobSet"
    known = [kind for kind in KINDS if kind != absent]
    for kind, patch in patches.items():
        if kind not in known:
            raise ConfigError(
                f"patch.{kind} is for an object that controller={controller} does not create. "
                f"Use one of {', '.join(known)}."
            )
        _check_directives(patch, f"patch.{kind}", is_item=False)
        for node in _mappings(patch):
            for variable in node["env"] if isinstance(node.get("env"), list) else ():
                if not isinstance(variable, dict):
                    continue
                name, value = (variable.get(key) for key in ("name", "value"))
                if _VARIABLE.fullmatch(str(name)) and isinstance(value, str):
                    check_variables({str(name): value})


def _check_directives(node: object, place: str, is_item: bool) -> None:
    """Rejects `$patch` where `merge` would leave it in the object."""
    if isinstance(node, dict):
        if _DIRECTIVE in node and (node[_DIRECTIVE] != "delete" or not is_item):
            raise ConfigError(
                f"{place} has {_DIRECTIVE}: {node[_DIRECTIVE]}. Use {_DIRECTIVE}: delete in an "
                "item of a list that has a name or mountPath, and null for anything else."
            )
        for key, child in node.items():
            _check_directives(child, f"{place}.{key}", is_item=False)
    elif isinstance(node, list):
        for index, child in enumerate(node):
            _check_directives(child, f"{place}.{index}", is_item=_merge_key(node) is not None)


def patched(objects: list[Object], patches: Mapping[str, Object]) -> list[Object]:
    """Merges each patch into the objects of its kind, from the inside out.

    Raises:
        ConfigError: it changes a value by which samestep finds the job.
    """
    return [_patched(each, patches) for each in objects]


def _patched(document: Object, patches: Mapping[str, Object]) -> Object:
    kind, changed = document["kind"], document
    if kind == "JobSet":
        groups = document["spec"]["replicatedJobs"]
        jobs = [{**group, "template": _job(group["template"], patches)} for group in groups]
        changed = {**document, "spec": {**document["spec"], "replicatedJobs": jobs}}
    elif kind == "Job":
        changed = _job(document, patches)
    if kind != "Job" and kind in patches:
        changed = dict(merge(changed, patches[kind]))
    if _identity(changed) != _identity(document):
        raise ConfigError(
            f"patch changes a {kind}'s kind, name, namespace or samestep.dev label, or the "
            f"container {CONTAINER}, by which samestep finds the job. Leave them out of the patch."
        )
    return changed


def _job(job: Object, patches: Mapping[str, Object]) -> Object:
    """A Job, or the template of one, with its pods."""
    pod = merge(job["spec"]["template"], patches.get("Pod", {}))
    whole = {**job, "spec": {**job["spec"], "template": pod}}
    return dict(merge(whole, patches.get("Job", {})))


def merge(base: Any, patch: Any) -> Any:
    """A value changed by a patch.

    Mappings are merged key by key, and null deletes a key. Lists of mappings are merged by the
    `mountPath`, or else the `name`, of their items if all items have one: items with a new name
    are appended, and one with `$patch: delete` is deleted. Anything else is replaced. A mapping or
    list stays one.

    Example: {a: 1, env: [{name: X, value: y}]} and {a: null, env: [{name: Z, value: z}]} give
    {env: [{name: X, value: y}, {name: Z, value: z}]}.

    Raises:
        ConfigError: the patch has something else where the object has a mapping or a list.
    """
    for kind, words in ((dict, "a mapping"), (list, "a list")):
        if isinstance(base, kind) and not isinstance(patch, kind):
            raise ConfigError(f"patch has {patch!r} where the object has {words}. Write {words}.")
    if isinstance(patch, dict):
        old = base if isinstance(base, dict) else {}
        new = {key: merge(old.get(key), value) for key, value in patch.items() if value is not None}
        kept = {key: value for key, value in old.items() if key not in patch or key in new}
        return {**kept, **new}
    if not isinstance(patch, list):
        return patch
    key = _merge_key(patch)
    if key is None:
        return patch
    items = base if isinstance(base, list) and _merge_key(base) else []
    merged = {item[key]: item for item in items if key in item}
    for change in patch:
        if _DIRECTIVE in change:
            merged.pop(change[key], None)
        else:
            merged[change[key]] = merge(merged.get(change[key]), change)
    return list(merged.values())


def _merge_key(items: list[Object]) -> str | None:
    """The key that tells the items of a list apart; None if the list is replaced as a whole."""
    if not items or not all(isinstance(item, dict) for item in items):
        return None
    return next((key for key in _MERGE_KEYS if all(key in item for item in items)), None)


def _identity(document: Object) -> list[object]:
    """The values by which `samestep jobs`, `logs` and `cancel` find an object and its pods."""
    found: list[object] = [document.get("kind"), document.get("apiVersion")]
    metadata = document.get("metadata") or {}
    found += [metadata.get("name"), metadata.get("namespace")]
    labels = [metadata.get("labels")]
    spec = document.get("spec") or {}
    jobs = [group.get("template") for group in spec.get("replicatedJobs") or ()] or [document]
    for job in jobs:
        pod = ((job or {}).get("spec") or {}).get("template") or {}
        labels += [(part.get("metadata") or {}).get("labels") for part in (job or {}, pod)]
        containers = (pod.get("spec") or {}).get("containers") or ()
        names = [each.get("name") for each in containers if isinstance(each, dict)]
        found.append(names.count(CONTAINER))
    for each in labels:
        found.append([(each or {}).get(label) for label in (JOB_LABEL, ACTION_LABEL)])
    return found


def _mappings(node: object) -> Iterator[Object]:
    if isinstance(node, dict):
        yield node
        node = list(node.values())
    for child in node if isinstance(node, list) else ():
        yield from _mappings(child)
