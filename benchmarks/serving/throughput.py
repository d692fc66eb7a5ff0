"""Throughput of ``feddg serve`` beside a bare loop, and 200 requests at once with hostile ones.

    OMP_NUM_THREADS=1 python benchmarks/serving/throughput.py RUN IMAGES

The bare loop decodes and answers one file after another in its own process, then in batches of 64.
The server, with the same weights and one thread for the model, is asked by ``--clients`` clients
that send one file a request. Then 200 requests are sent at once, two of them hostile in each of ten
ways, and a body of 500 MB; what each is told, and the server's memory after every such storm, is
printed. Images per CPU second, of the loop's or the server's process alone, so that other work on
the machine matters less.
"""

import argparse
import asyncio
import os
import sys
import time
from itertools import cycle, islice
from pathlib import Path

import httpx
import numpy

from feddg.data.decoding import quiet_pillow
from feddg.prediction.classifier import RunClassifier, image_files

sys.path += [str(Path(__file__).parents[2] / folder) for folder in ("tests", "tests/helpers")]
from serving.test_load import storm

from hostile_uploads import hostile_uploads
from served_models import ServerProcess, served_by_a_process

LARGE = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--storms", type=int, default=5)
    chosen = parser.parse_args()
    files = list(islice(cycle(image_files([chosen.images])), chosen.count))
    print("| | images per CPU second |\n|---|---:|")
    print(f"| bare loop, one file at a time | {_bare(chosen.run, files, 1):.0f} |")
    print(f"| bare loop, batches of 64 | {_bare(chosen.run, files, 64):.0f} |")
    with served_by_a_process(chosen.run) as server:
        contents = [file.read_bytes() for file in files]
        for clients in (1, chosen.clients):
            speed = asyncio.run(_served(server, contents, clients))
            print(f"| served, {clients} clients, a file a request | {speed:.0f} |")
        hostile = {20 * place: upload for place, upload in enumerate(hostile_uploads()[:10])}
        print(f"\nresident before: {server.resident_bytes / 2**20:.0f} MB")
        for number in range(1, chosen.storms + 1):
            started = time.perf_counter()
            found = asyncio.run(storm(server.address, 200, hostile, LARGE))
            seconds = time.perf_counter() - started
            held = server.resident_bytes / 2**20
            print(f"storm {number}: {seconds:.1f} s, resident {held:.0f} MB")
        for (what, status), count in sorted(found.items()):
            print(f"{what}: {count} x {status}")


def _bare(run: Path, files: list[Path], batch: int) -> float:
    model = RunClassifier(run)
    started = time.process_time()
    with quiet_pillow():
        for start in range(0, len(files), batch):
            part = [model.preparation.decode(file) for file in files[start : start + batch]]
            model.answer(numpy.stack(part))
    return len(files) / (time.process_time() - started)


async def _served(server: ServerProcess, contents: list[bytes], clients: int) -> float:
    left = iter(contents)
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=server.address, timeout=60, limits=limits) as client:

        async def ask() -> None:
            for content in left:
                reply = await client.post("predict", files={"images": ("a.png", content)})
                assert reply.status_code == 200, reply.text

        started = _cpu_seconds(server.id)
        await asyncio.gather(*(ask() for _ in range(clients)))
        return len(contents) / (_cpu_seconds(server.id) - started)


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
