"""Schemas of other programs: any JSON Schema of an object, not only those of typed functions."""

from __future__ import annotations

import socket

import pytest

from agentrl.errors import ToolDefinitionError, ToolRejected
from agentrl.tools import Tool
from agentrl.types.seams import ToolSchema

SCHEMAS = {
    "required and unknown": {"required": ["x"]},
    "any value": {"properties": {"x": True}, "required": ["x"]},
    "several types": {"properties": {"x": {"type": ["string", "null"]}}},
    "definitions": {
        "properties": {"x": {"$ref": "#/definitions/P"}},
        "definitions": {"P": {"type": "integer"}},
    },
    "pattern": {"patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False},
    "one of": {"properties": {"x": {"oneOf": [{"type": "integer"}, {"type": "string"}]}}},
    "not": {"not": {"required": ["x"]}},
    "dependent": {"dependentRequired": {"x": ["y"]}},
    "false": {"properties": {"x": False}},
    "names": {"propertyNames": {"maxLength": 3}},
    "inside": {"properties": {"x": {"type": "object", "required": ["q"]}}},
    "unevaluated": {"properties": {"x": {}}, "unevaluatedProperties": False},
    "any of": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
}
ARGUMENTS = [{}, {"x": 1.5}, {"x": None}, {"x": "s"}, {"x": {}}, {"x": [1]}, {"a": "q"}, {"long": [1]}]


def foreign(parameters) -> Tool:
    async def taken(**arguments) -> str:
        return "taken"

    return Tool.described(ToolSchema("foreign", "Somebody else's.", {"type": "object", **parameters}), taken)


@pytest.mark.parametrize("policy", ["strict", "coerce"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_a_model_writes_fits_or_gets_a_sentence(name, policy):
    reader = foreign(SCHEMAS[name]).reader
    fits = [arguments for arguments in ARGUMENTS if reader.validator.is_valid(arguments)]
    assert 0 < len(fits) < len(ARGUMENTS)
    for arguments in ARGUMENTS:
        try:
            reader.read(arguments, policy)
        except ToolRejected as rejected:
            assert arguments not in fits
            sentence = str(rejected)
            assert sentence.startswith("foreign: ")
            assert sentence.endswith(".")
            assert "``" not in sentence


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("required and unknown", {}, "foreign: parameter `x` is missing."),
        ("several types", {"x": 1.5}, "foreign: parameter `x` must be a string or null, but got 1.5."),
        ("definitions", {"x": "s"}, 'foreign: parameter `x` must be an integer, but got "s".'),
        ("false", {"x": 1}, "foreign: what it takes must be left out, but got 1."),
        ("inside", {"x": {}}, "foreign: parameter `q` is missing in parameter `x`."),
    ],
)
def test_its_schemas_accept_what_its_tools_accept(name, arguments, sentence):
    with pytest.raises(ToolRejected) as rejected:
        foreign(SCHEMAS[name]).reader.read(arguments)
    assert str(rejected.value) == sentence


@pytest.mark.parametrize("reference", ["#/$defs/Missing", "other.json", "https://json-schema.org/schema"])
def test_a_schema_with_external_references_is_refused(reference):
    with pytest.raises(
        ToolDefinitionError, match=r"refer to '.*', which they do not hold; nothing is fetched"
    ):
        foreign({"properties": {"x": {"items": {"$ref": reference}}}})


def test_nothing_is_fetched_for_a_schema():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"
        with pytest.raises(ToolDefinitionError):
            foreign({"properties": {"x": {"$ref": address}}}).reader.read({"x": 1})
        with pytest.raises(BlockingIOError):
            server.accept()
