"""The part of JSON Schema that tool parameters use: types, required, unknown properties, enum, items, anyOf."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def argument_error(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str | None:
    """Why ``arguments`` do not satisfy an object schema, in words for the model; None where they do."""
    properties = schema.get("properties", {})
    for key in schema.get("required", ()):
        if key not in arguments:
            return f"argument {key} is missing"
    for key, value in arguments.items():
        if key not in properties:
            return f"unknown argument {key!r}; the arguments are: {', '.join(properties) or 'none'}"
        if error := _value_error(value, properties[key]):
            return f"argument {key} {error}"
    return None


def from_text(text: str, schema: Mapping[str, Any]) -> Any:
    """``text`` as the value a property wants: a number where only numbers fit, else the text itself."""
    types = _types_of(schema)
    if "string" in types or not types:
        return text
    if _NUMBER.fullmatch(text) and ("number" in types or "integer" in types):
        return float(text) if "." in text else int(text)
    return [text] if "array" in types else {"true": True, "false": False}.get(text, text)


_NUMBER = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?")


def _types_of(schema: Mapping[str, Any]) -> tuple[str, ...]:
    declared = schema.get("type", ())
    types = (declared,) if isinstance(declared, str) else tuple(declared)
    return types + tuple(kind for option in schema.get("anyOf", ()) for kind in _types_of(option))


def _value_error(value: Any, schema: Mapping[str, Any]) -> str | None:
    if options := schema.get("anyOf"):
        return None if any(_value_error(value, option) is None for option in options) else "fits none of its forms"
    types = _types_of(schema)
    if types and not any(_is(value, kind) for kind in types):
        return f"must be of type {' or '.join(types)}"
    if "enum" in schema and value not in schema["enum"]:
        return f"must be one of {', '.join(map(str, schema['enum']))}"
    if isinstance(value, list) and "items" in schema:
        return next((error for item in value if (error := _value_error(item, schema["items"]))), None)
    if isinstance(value, dict) and "properties" in schema:
        return argument_error(value, schema)
    return None


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):  # in Python a bool is an int; in JSON it is not
        return kind == "boolean"
    return isinstance(value, _TYPES.get(kind, ()))
