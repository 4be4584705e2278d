"""The manifest of a log: all that a dispatcher is built from, so that a replay needs no trace and no card."""

import hashlib
import json
import platform
import re
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pydantic import ValidationError

import simcluster
from simcluster import _native
from simcluster.card import FrontEnd, ServiceRates
from simcluster.errors import ConfigError
from simcluster.instance import InstanceSpec
from simcluster.request import RequestColumns, RequestTruth
from simcluster.scenario import Scenario
from simcluster.world import World

__all__ = ["MANIFEST", "make_manifest", "options_from_json", "options_to_json", "policy_changes", "rebuild"]

MANIFEST: Final = "manifest.json"
KIND: Final = "simcluster decision log"
_SCHEMA = 1
_ENUMS: Final = {"policy": _native.Policy, "vllm_version": _native.VllmVersion}


def _settings(native: Any) -> dict[str, Any]:
    """Return the properties of a native object as plain data."""
    values = {name: getattr(native, name) for name, kind in vars(type(native)).items() if isinstance(kind, property)}
    return {name: value.name if name in _ENUMS else value for name, value in values.items()}


def _with_settings(native: Any, values: dict[str, Any]) -> Any:
    known = {name for name, kind in vars(type(native)).items() if isinstance(kind, property)}
    if known != set(values):
        raise ValueError(f"it has other options than this version: {', '.join(sorted(known ^ set(values)))}")
    for name, value in values.items():
        setattr(native, name, getattr(_ENUMS[name], value) if name in _ENUMS else value)
    return native


def options_to_json(options: _native.SchedulerConfig) -> str:
    """Return the options of an instance as JSON."""
    return json.dumps(_settings(options))


def options_from_json(text: str) -> _native.SchedulerConfig:
    """Return the options of an instance.

    Raises:
        ValueError: they are not those of this version.
    """
    found: _native.SchedulerConfig = _with_settings(_native.SchedulerConfig(), json.loads(text))
    return found


def make_manifest(world: World, scenario: Scenario, policy: str, speed: float) -> dict[str, Any]:
    """Return the manifest of a router, as JSON can hold it.

    Args:
        world: its instances and means.
        scenario: its settings.
        policy: who decides.
        speed: seconds of its clock per second.
    """
    known = world.known
    return {
        "kind": KIND,
        "schema_version": _SCHEMA,
        "started_ns": time.time_ns(),
        "policy": policy,
        "policy_files": _policy_files(policy),
        "speed": speed,
        "scenario": scenario.resolved(),
        "scenario_sha256": scenario.digest(),
        "instances": [_instance(spec) for spec in world.instances],
        "group_of_instance": known.group_of_instance.tolist(),
        "mean_output_tokens": known.predicted_output_tokens.mean(axis=0).tolist(),
        "inputs": world.inputs,
        "assumptions": list(world.assumptions),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return what decisions may depend on beside the code."""
    return {
        "simcluster": simcluster.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "pyarrow": pa.__version__,
    }


def _policy_files(policy: str) -> dict[str, str]:
    """Return hashes of the files of a user's policy."""
    found = {name: Path(name) for name in re.findall(r"[^(),:]+\.py", policy)}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items() if path.is_file()}


def policy_changes(manifest: dict[str, Any]) -> list[str]:
    """Return the files of a user's policy that are gone or have changed since the log was written."""
    now = _policy_files(manifest["policy"])
    return [name for name, digest in manifest["policy_files"].items() if now.get(name) != digest]


def _instance(spec: InstanceSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "model": spec.model,
        "card": spec.card,
        "price_in": spec.price_in,
        "price_out": spec.price_out,
        "engine": _settings(spec.engine),
        "believed": _settings(spec.believed),
        "front_end": spec.front_end.model_dump(mode="json"),
        "service_rates": None if spec.service_rates is None else spec.service_rates.model_dump(mode="json"),
        "badge": spec.badge,
    }


def _spec(index: int, content: dict[str, Any]) -> InstanceSpec:
    rates = content["service_rates"]
    return InstanceSpec(
        index=index,
        engine=_with_settings(_native.SchedulerConfig(), content["engine"]),
        believed=_with_settings(_native.StepTimeModel(), content["believed"]),
        front_end=FrontEnd.model_validate(content["front_end"]),
        service_rates=None if rates is None else ServiceRates.model_validate(rates),
        **{name: content[name] for name in ("name", "model", "card", "price_in", "price_out", "badge")},
    )


def rebuild(manifest: dict[str, Any], where: str) -> tuple[World, Scenario]:
    """Return what a dispatcher is built from; of requests the world knows the means alone.

    Args:
        manifest: of a log.
        where: its file, for messages.

    Raises:
        ConfigError: it is not the manifest of a log, or of another version's.
    """
    if manifest.get("kind") != KIND:
        raise ConfigError(f"{where}: is not the manifest of a decision log; give the folder of `router --log`")
    if manifest.get("schema_version") != _SCHEMA:
        raise ConfigError(f"{where}: schema_version = {manifest.get('schema_version')}; this version reads {_SCHEMA}")
    try:
        scenario = Scenario.model_validate_json(json.dumps(manifest["scenario"]))
        instances = tuple(_spec(j, content) for j, content in enumerate(manifest["instances"]))
        groups = np.array(manifest["group_of_instance"], dtype=np.int64)
        means = np.array([manifest["mean_output_tokens"]], dtype=np.float64)
    except ValidationError as error:
        raise ConfigError(f"{where}: {error.error_count()} of its values are not allowed; it was changed") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{where}: cannot be used ({error}); it was changed or another version wrote it") from None
    if len(groups) != len(instances) or not len(groups) or means.shape[1] != groups.max() + 1:
        raise ConfigError(f"{where}: instances, groups and means do not fit together; it was changed")
    return _world(instances, groups, means), scenario


def _world(instances: tuple[InstanceSpec, ...], groups: Any, means: Any) -> World:
    one, empty = np.zeros(1, dtype=np.int64), np.zeros(means.shape)
    return World(
        instances=instances,
        true_models=(),
        num_gpus=(),
        request_id=np.array(["mean"], dtype=object),
        task=None,
        known=RequestColumns(
            group_of_instance=groups,
            arrival_ps=one,
            prompt_tokens=empty.astype(np.int64),
            max_tokens=one - 1,
            priority=one,
            slo_ttft_ps=one - 1,
            predicted_output_tokens=means,
            predicted_quality=empty,
            predicted_utility=empty,
        ),
        truth=RequestTruth(
            output_tokens=empty.astype(np.int64),
            quality=empty,
            ends_by_length=one.astype(bool),
            cancel_after_ps=one - 1,
        ),
        cost_weight=0.0,
        assumptions=(),
        warnings=(),
        notes=(),
        inputs={},
    )
