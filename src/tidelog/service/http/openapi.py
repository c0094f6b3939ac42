"""The description of the API (OpenAPI 3.1), made from the table of routes."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from tidelog.service.http.problems import PROBLEM_TYPE, Problem
from tidelog.service.http.routes import JSON, Route

_REFERENCE = "#/components/schemas/{name}"
_NOT_FOR_CLIENTS = ("WEBSOCKET",)


def describe(routes: Sequence[Route], version: str = "1") -> dict[str, Any]:
    """The document, ready for JSON."""
    kinds: dict[Any, None] = {Problem: None}
    for route in routes:
        kinds |= dict.fromkeys(kind for kind in (route.query, route.body, route.response) if kind is not None)
    schemas, components = msgspec.json.schema_components(list(kinds), ref_template=_REFERENCE)
    schema_of = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        method = "get" if route.method in _NOT_FOR_CLIENTS else route.method.lower()
        paths.setdefault(route.path, {})[method] = _operation(route, schema_of, components)
    queries = {route.query.__name__ for route in routes}
    return {
        "openapi": "3.1.0",
        "info": {"title": "tidelog", "version": version, "description": "Topics, subscriptions and engines over HTTP."},
        "paths": paths,
        "components": {
            "schemas": {name: schema for name, schema in components.items() if name not in queries},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, schema_of: dict[Any, Any], components: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "tags": [route.tag],
        "summary": route.summary,
        "parameters": [*_path_parameters(route), *_query_parameters(route, components)],
        "responses": {
            **{str(status.value): _response(route, status, schema_of) for status in _statuses(route)},
            "default": {
                "description": "The request was refused, or failed.",
                "content": {PROBLEM_TYPE: {"schema": schema_of[Problem]}},
            },
        },
        "x-permission": route.permission or "none",
        "x-resource": route.resource,
    }
    if route.description:
        operation["description"] = route.description
    if route.body is not None or route.body_types:
        operation["requestBody"] = {"required": True, "content": _content(route.body, route.body_types, schema_of)}
    if not route.is_public:
        operation["security"] = [{}, {"bearer": []}]
    return operation


def _statuses(route: Route) -> list[HTTPStatus]:
    if route.mode == "socket":
        return [HTTPStatus.SWITCHING_PROTOCOLS]
    if route.response is None and not route.response_types:
        return [HTTPStatus.NO_CONTENT]
    return [route.status, HTTPStatus.ACCEPTED] if route.may_go_on else [route.status]


def _response(route: Route, status: HTTPStatus, schema_of: dict[Any, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": status.phrase}
    content = _content(route.response, route.response_types, schema_of)
    return answer | ({"content": content} if content else {})


def _content(kind: Any, media_types: tuple[str, ...], schema_of: dict[Any, Any]) -> dict[str, Any]:
    content = {} if kind is None else {JSON: {"schema": schema_of[kind]}}
    return content | {media_type: {} for media_type in media_types if media_type not in content}


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in route.parameters]


def _query_parameters(route: Route, components: dict[str, Any]) -> list[dict[str, Any]]:
    schema = components[route.query.__name__]
    required = schema.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in required, "schema": value}
        for name, value in schema.get("properties", {}).items()
    ]
