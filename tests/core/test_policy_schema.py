# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The exported JSON Schema agrees with the loader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from te_dispatch.core.policy.schema import NumericsModel, PolicyModel, RuleModel, ShadowModel, json_schema
from te_dispatch.core.shipped import shipped_policies

_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}


def problem(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> str | None:
    """What of JSON Schema the policy's schema uses, so that the check needs no further package."""
    used = {"$ref", "anyOf", "enum", "type", "items", "minItems", "properties", "required", "additionalProperties"}
    used |= {"minLength", "minimum", "exclusiveMinimum", "maximum"}
    assert set(schema) <= used | {"$schema", "$defs", "title", "description", "default"}, "extend this validator"
    if "$ref" in schema:
        return problem(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        found = [problem(value, option, root) for option in schema["anyOf"]]
        return None if None in found else str(found)
    if "enum" in schema:
        return None if value in schema["enum"] and not isinstance(value, bool) else f"{value!r} not in {schema['enum']}"
    if schema["type"] == "null":
        return None if value is None else f"{value!r} is not null"
    is_bool = isinstance(value, bool)
    if not isinstance(value, _TYPES[schema["type"]]) or is_bool != (schema["type"] == "boolean"):
        return f"{value!r} is no {schema['type']}"
    if isinstance(value, str):
        return "too short" if len(value) < schema.get("minLength", 0) else None
    if isinstance(value, (int, float)) and not is_bool:
        low, above = schema.get("minimum", value), schema.get("exclusiveMinimum")
        inside = low <= value <= schema.get("maximum", value) and (above is None or value > above)
        return None if inside else f"{value} is out of range"
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            return "too few"
        return next((p for item in value if (p := problem(item, schema["items"], root))), None)
    return _mapping_problem(value, schema, root) if isinstance(value, dict) else None


def _mapping_problem(value: dict[str, Any], schema: dict[str, Any], root: dict[str, Any]) -> str | None:
    missing = set(schema.get("required", ())) - set(value)
    if missing:
        return f"{missing} missing"
    for key, item in value.items():
        inner = schema.get("properties", {}).get(key, schema["additionalProperties"])
        if inner is False:
            return f"{key!r} unknown"
        found = problem(item, inner, root)
        if found:
            return found
    return None


@pytest.mark.parametrize("name", sorted(shipped_policies()))
def test_shipped_policies_fit(name: str) -> None:
    schema = json_schema()
    data = yaml.safe_load(shipped_policies()[name].read_text(encoding="utf-8"))
    assert problem(data, schema, schema) is None


def test_shadow_fits() -> None:
    schema = json_schema()
    section = {"against": "torch", "fraction": 1, "on_mismatch": "raise", "ops": ["gemm"], "directory": "x", "limit": 0}
    for shadow in ("off", {"against": "torch"}, section):
        assert problem({"version": 1, "shadow": shadow}, schema, schema) is None


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"version": 2},
        {"version": 1, "prefre": []},
        {"version": 1, "prefer": "torch"},
        {"version": 1, "allow": None},
        {"version": 1, "require": []},
        {"version": 1, "numerics": {"deterministic": 1}},
        {"version": 1, "numerics": {"fp8_portability": "comon"}},
        {"version": 1, "shadow": {}},
        {"version": 1, "shadow": "on"},
        {"version": 1, "shadow": {"against": "torch", "fraction": 0}},
        {"version": 1, "shadow": {"against": "torch", "fraction": 1.5}},
        {"version": 1, "shadow": {"against": "torch", "on_mismatch": "stop"}},
        {"version": 1, "shadow": {"against": "torch", "ops": []}},
        {"version": 1, "shadow": {"against": "torch", "directory": ""}},
        {"version": 1, "shadow": {"against": "torch", "limit": -1}},
        {"version": 1, "rules": [{"prefer": ["torch"]}]},
        {"version": 1, "rules": [{"op": "gemm", "when": {"k": {}}}]},
    ],
)
def test_schema_refuses_what_the_loader_refuses(data: dict[str, Any]) -> None:
    schema = json_schema()
    assert problem(data, schema, schema) is not None


def test_every_key_is_described_and_nothing_else_is_accepted() -> None:
    definitions = json_schema()["$defs"]
    for model in (PolicyModel, RuleModel, NumericsModel, ShadowModel):
        definition = definitions[model.__name__]
        assert set(definition["properties"]) == set(model.__struct_fields__)
        assert definition["additionalProperties"] is False
    for model in (RuleModel, ShadowModel):
        properties = definitions[model.__name__]["properties"]
        assert [name for name, schema in properties.items() if "description" not in schema] == []


def test_it_is_json() -> None:
    assert json.loads(json.dumps(json_schema()))["$schema"].startswith("https://json-schema.org/")


def test_jsonschema_agrees() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for path in shipped_policies().values():
        jsonschema.validate(yaml.safe_load(Path(path).read_text(encoding="utf-8")), schema)
