"""A helper's service, served to a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from fedstream.helper.service import HelperService
from fedstream.helper.settings import HelperSettings
from fedstream.private.policy import PrivacyPolicy
from fedstream.runtime.http import HttpSettings, application
from fedstream.runtime.service import Context
from tests.private.enrolled import files
from tests.support import context, wait_until

Http = TestClient[web.Request, web.Application]


@asynccontextmanager
async def serving(
    folder: Path,
    http: HttpSettings | None = None,
    its: Context | None = None,
    policy: PrivacyPolicy | None = None,
    **changes: Any,
) -> AsyncIterator[Http]:
    """A helper over HTTP, whose files are in ``folder``."""
    its = its or context()
    service = HelperService(
        HelperSettings(**files(folder, policy) | changes), http or HttpSettings()
    )
    running = asyncio.create_task(service.run(its))
    client: Http = TestClient(TestServer(application(service.routes(), its.stop.is_set)))
    await client.start_server()
    try:
        await wait_until(lambda: service._worker is not None)
        yield client
    finally:
        await client.close()
        its.stop.set()
        await running
