"""Configs of groups, as administrators set and see them, with a server in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.service.kafka.test_server import Client, Running, play

from tidelog.service.kafka.codec import wire
from tidelog.service.kafka.error_codes import ErrorCode

DESCRIBE_CONFIGS, ALTER_CONFIGS, INCREMENTAL_ALTER_CONFIGS = 32, 33, 44
GROUP = 32
SET, DELETE = 0, 1
START = "share.auto.offset.reset"


async def alter(client: Client, name: str, value: str | None, operation: int = SET, **fields: Any) -> tuple[int, str]:
    module = wire(INCREMENTAL_ALTER_CONFIGS)
    config = module.IncrementalAlterConfigsRequestAlterableConfig(name, operation, value)
    resource = module.IncrementalAlterConfigsRequestAlterConfigsResource(
        GROUP, fields.pop("group", "workers"), [config]
    )
    request = module.IncrementalAlterConfigsRequest(resources=[resource], **fields)
    (answer,) = (await client.call(INCREMENTAL_ALTER_CONFIGS, 1, request)).responses
    return answer.error_code, answer.error_message or ""


async def described(client: Client, group: str = "workers") -> tuple[str, int]:
    """Value and source of the config."""
    module = wire(DESCRIBE_CONFIGS)
    resource = module.DescribeConfigsRequestResource(GROUP, group, None)
    (answer,) = (await client.call(DESCRIBE_CONFIGS, 4, module.DescribeConfigsRequest(resources=[resource]))).results
    assert answer.error_code == ErrorCode.NONE
    (config,) = answer.configs
    assert config.name == START
    return config.value, config.config_source


def test_configs_of_a_group_are_kept(tmp_path: Path) -> None:
    """Also by the next start; a group without one has the default, and so has one whose config was deleted."""

    async def change(server: Running) -> None:
        client = await server.client()
        assert await described(client) == ("latest", 5)
        assert await alter(client, START, "earliest", validate_only=True) == (0, "")
        assert await described(client) == ("latest", 5)
        assert await alter(client, START, "earliest") == (0, "")
        assert await described(client) == ("earliest", 8)
        assert await described(client, "others") == ("latest", 5)
        assert server.node._group_configs.share_start("workers") == "earliest"

    async def look(server: Running) -> None:
        client = await server.client()
        assert await described(client) == ("earliest", 8)
        assert await alter(client, START, None, DELETE) == (0, "")
        assert await described(client) == ("latest", 5)
        assert server.node._group_configs.share_start("workers") == "latest"

    play(tmp_path, change)
    play(tmp_path, look)


@pytest.mark.parametrize(
    ("name", "value", "group", "code", "words"),
    [
        (START, "by_duration:PT1H", "workers", ErrorCode.INVALID_CONFIG, "must be latest or earliest"),
        ("consumer.session.timeout.ms", "1000", "workers", ErrorCode.INVALID_CONFIG, "groups have no config"),
        (START, None, "workers", ErrorCode.INVALID_REQUEST, "Null value"),
        (START, "earliest", "", ErrorCode.INVALID_REQUEST, ""),
    ],
)
def test_configs_without_an_effect_are_refused(
    tmp_path: Path, name: str, value: str | None, group: str, code: ErrorCode, words: str
) -> None:
    """By name: who sets one believes that it does something."""

    async def work(server: Running) -> None:
        client = await server.client()
        found, text = await alter(client, name, value, group=group)
        assert (found, words in text) == (code, True)
        assert await described(client) == ("latest", 5)

    play(tmp_path, work)
