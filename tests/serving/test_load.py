"""Many requests at once, hostile ones among them: each is answered, and the server stays small."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")
pytest.importorskip("python_multipart", reason="needs the extra `serve`")
httpx = pytest.importorskip("httpx", reason="needs httpx")

from hostile_uploads import CONTENT_TYPE, Upload, hostile_uploads, multipart, png
from served_models import ServerProcess, served_by_a_process

GROWTH = 96 * 2**20
"""What the allocator may keep of work that is done; a leak of bodies or images is far more."""


async def body_of(megabytes: int):
    """A body that is made as it is sent."""
    yield multipart(("a.png", b"x")).split(b"x")[0]
    for _ in range(megabytes):
        yield bytes(2**20)


async def storm(address: str, count: int, hostile: dict[int, Upload], large: int) -> Counter:
    """Sends requests at once; returns how often each (what, status) came back."""
    found: Counter = Counter()
    limits = httpx.Limits(max_connections=count + 1)
    async with httpx.AsyncClient(base_url=address, timeout=300, limits=limits) as client:

        async def one(place: int) -> None:
            if place in hostile:
                upload = hostile[place]
                kind, content, type_ = upload.name, upload.body, upload.content_type
            else:
                kind, content, type_ = "good", multipart((f"{place}.png", png(48, place))), None
            headers = {"content-type": type_ or CONTENT_TYPE}
            reply = await client.post("predict", content=content, headers=headers)
            assert "detail" in reply.json()
            found[kind, reply.status_code] += 1

        async def flood() -> None:
            headers = {"content-type": CONTENT_TYPE}
            reply = await client.post("predict", content=body_of(large), headers=headers)
            found["large body", reply.status_code] += 1

        await asyncio.gather(flood(), *map(one, range(count)))
    return found


def weather(server: ServerProcess, rounds: int, count: int, kinds: int, large: int) -> None:
    """Storms again and again; all but the first must leave no more memory behind."""
    every = count // kinds
    hostile = {every * place: upload for place, upload in enumerate(hostile_uploads()[:kinds])}
    held = []
    for _ in range(rounds):
        found = asyncio.run(storm(server.address, count, hostile, large))
        assert found.pop(("large body", 413)) == 1
        assert found.pop(("good", 200)) == count - len(hostile)
        for upload in hostile.values():
            assert sum(found.pop((upload.name, status), 0) for status in upload.statuses) == 1
        assert not found
        if Path("/proc").is_dir():
            held.append(server.resident_bytes)
    assert not held or max(held[1:]) < held[0] + GROWTH
    assert httpx.get(f"{server.address}health").json() == {"status": "ok"}


def test_a_storm_of_requests_is_weathered(finished):
    with served_by_a_process(finished, "--request-megabytes", "4") as server:
        weather(server, rounds=3, count=40, kinds=14, large=64)


@pytest.mark.slow
def test_a_storm_of_two_hundred_with_a_body_of_500_megabytes(finished):
    with served_by_a_process(finished) as server:
        weather(server, rounds=5, count=200, kinds=14, large=500)


def test_a_line_that_is_full_sends_away_and_serves_on(finished):
    flags = ("--at-once", "1", "--waiting", "1")
    with served_by_a_process(finished, *flags) as server:
        found = asyncio.run(storm(server.address, 30, {}, large=1))
        statuses = {status for _, status in found}
        assert 200 in statuses
        assert statuses <= {200, 400, 503}
        assert httpx.get(f"{server.address}health").status_code == 200
