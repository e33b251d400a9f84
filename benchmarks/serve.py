"""Ask a server many things at once, teach it a class in the middle, and check every answer.

    python benchmarks/serve.py [--requests 10000] [--clients 32] [--data FOLDER] [-- FLAGS OF efcil learn]

FOLDER has one sub-folder of images per class; without it, small pictures of coloured shapes are made. All classes but
the last are learned with `efcil learn`, with the flags after `--`. Then `efcil serve` runs in a process of its own, and
every client asks about one picture at a time. The last class is taught when a quarter of the requests has been
answered. Every answer names the state of the model that gave it, and is compared with what that model says of the
picture when it is asked alone: all classes, all probabilities, to 1e-4. A request without an answer of status 200 is
lost, an answer that differs is wrong; the exit code is 1 if there is one of either, or if no answer came from the new
model.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from efcil.data.decode import Encoded, decode_image
from efcil.environment import code, hardware
from efcil.model import Model
from efcil.model.images import class_folders, model_fit
from efcil.serve.answering import score
from efcil.serve.keeper import version_of

SMALL = ["--network", "slim", "--image-size", "16", "--epochs", "20", "--batch-size", "8", "--method", "efc"]
TOLERANCE = 1e-4
MOST_PICTURES = 60


@dataclass
class Log:
    """What the clients saw: picture, status, answer, when it began, how long it took."""

    rows: list[tuple[int, int, Any, float, float]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, *row: Any) -> None:
        with self.lock:
            self.rows.append(row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--data", type=Path, help="one sub-folder of images per class")
    parser.add_argument("flags", nargs="*", help="flags of `efcil learn`, after --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        data = arguments.data or make_pictures(root / "pictures")
        paths, labels = class_folders(data)
        last = sorted(set(labels))[-1]
        for path, label in zip(paths, labels, strict=True):
            target = root / ("last" if label == last else "first") / label
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        flags = arguments.flags or ([] if arguments.data else SMALL)
        learn = [sys.executable, "-m", "efcil", "learn", str(root / "model"), "--data", str(root / "first"), "--quiet"]
        subprocess.run([*learn, *flags], check=True)
        pictures = [Path(path) for path in paths[:: max(1, len(paths) // MOST_PICTURES)]]
        return measure(root / "model", pictures, root / "last" / last, arguments.requests, arguments.clients)


def make_pictures(folder: Path) -> Path:
    """Draw shapes in four colours, 24 pictures of each."""
    draw = np.random.default_rng(0)
    for name, colour in (("blue", "royalblue"), ("green", "seagreen"), ("red", "firebrick"), ("yellow", "gold")):
        (folder / name).mkdir(parents=True)
        for number in range(24):
            image = Image.new("RGB", (160, 120), tuple(draw.integers(180, 255, 3).tolist()))
            left, top, side = draw.integers(5, 40, 3).tolist()
            ImageDraw.Draw(image).ellipse((left, top, left + 40 + side, top + 40 + side), fill=colour)
            image.save(folder / name / f"{number:02}.jpg")
    return folder


def measure(folder: Path, pictures: list[Path], lesson: Path, requests: int, clients: int) -> int:
    """Serve the model, ask, teach, and print what came of it."""
    expected = {version_of(folder): answers(folder, pictures)}
    old = next(iter(expected))
    contents = [picture.read_bytes() for picture in pictures]
    log, numbers, quarter = Log(), itertools.count(), threading.Event()
    server, port = start(folder)
    try:

        def ask() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            while (number := next(numbers)) < requests:
                if number == requests // 4:
                    quarter.set()
                picture, began = number % len(pictures), time.perf_counter()
                try:
                    connection.request("POST", "/api/predict?top=1000", contents[picture])
                    response = connection.getresponse()
                    status, body = response.status, json.loads(response.read())
                except (OSError, ValueError, http.client.HTTPException) as error:
                    status, body = 0, repr(error)
                    connection.close()
                log.add(picture, status, body, began, time.perf_counter() - began)

        threads = [threading.Thread(target=ask) for _ in range(clients)]
        start_time = time.perf_counter()
        for thread in threads:
            thread.start()
        quarter.wait()
        taught, swapped, job = teach(port, lesson)
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start_time
        batches = batch_sizes(port)
    finally:
        server.terminate()
        server.wait()
    if job["state"] != "done":
        print(f"The teaching {job['state']}: {job['error']}")
        return 1
    expected[version_of(folder)] = answers(folder, pictures)
    return report(log, expected, old, (taught, swapped), seconds, clients, batches)


def start(folder: Path) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "efcil", "serve", str(folder), "--port", "0", "--rate", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    found = re.search(r":(\d+)", server.stdout.readline())
    if found is None:
        raise SystemExit("the server did not start")
    port = int(found[1])
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return server, port
        except OSError:
            time.sleep(0.1)


def teach(port: int, lesson: Path) -> tuple[float, float, dict[str, Any]]:
    """Teach a class; return when that began, when the new model had taken over, and how it ended."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    boundary = "efcil-benchmark"
    parts = [f'--{boundary}\r\nContent-Disposition: form-data; name="class"\r\n\r\n{lesson.name}\r\n'.encode()]
    for number, file in enumerate(sorted(lesson.iterdir())):
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="{number}"\r\n\r\n'
        parts.append(head.encode() + file.read_bytes() + b"\r\n")
    parts.append(f"--{boundary}--\r\n".encode())
    began = time.perf_counter()
    headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    connection.request("POST", "/api/teach", b"".join(parts), headers)
    job = json.loads(connection.getresponse().read())
    if "error" in job and "id" not in job:
        raise SystemExit(job["error"])
    while job["ended"] is None:
        time.sleep(0.1)
        connection.request("GET", f"/api/jobs/{job['id']}")
        job = json.loads(connection.getresponse().read())
    return began, time.perf_counter(), job


def batch_sizes(port: int) -> float:
    """Return how many images were scored together on average."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    total, count = (float(re.search(rf"efcil_batch_images_{name} (\S+)", text)[1]) for name in ("sum", "count"))  # type: ignore[index]
    return total / count


def answers(folder: Path, pictures: list[Path]) -> list[dict[str, float]]:
    """Return what the model says of every picture when it is asked alone."""
    model = Model.load(folder)
    fit = model_fit(model.card.image_size)
    found = []
    for picture in pictures:
        pixels = decode_image(Encoded(picture.read_bytes(), picture.name), fit)
        (row,) = score(model, np.stack([pixels])).probabilities
        found.append(dict(zip(map(str, model.card.labels), row.tolist(), strict=True)))
    return found


def is_right(picture: int, body: Any, expected: dict[str, list[dict[str, float]]]) -> bool:
    wanted = expected.get(body["version"])
    if wanted is None:
        return False
    given = {each["name"]: each["probability"] for each in body["predictions"][0]["classes"]}
    row = wanted[picture]
    return given.keys() == row.keys() and all(abs(given[name] - row[name]) <= TOLERANCE for name in row)


def report(
    log: Log,
    expected: dict[str, list[dict[str, float]]],
    old: str,
    teaching: tuple[float, float],
    seconds: float,
    clients: int,
    batches: float,
) -> int:
    """Print the table; return the exit code."""
    answered = [row for row in log.rows if row[1] == 200]
    lost = len(log.rows) - len(answered)
    wrong = sum(not is_right(picture, body, expected) for picture, _, body, _, _ in answered)
    new = sum(body["version"] != old for _, _, body, _, _ in answered)
    print(
        f"{len(log.rows):,} requests, {clients} clients, {seconds:.1f} s ({len(log.rows) / seconds:.0f} a second), "
        f"{batches:.1f} images a batch; {hardware()['cpu']}, {os.cpu_count()} cores, "
        f"{os.environ.get('OMP_NUM_THREADS', 'all')} threads, commit {code()}"
    )
    print(f"lost {lost}, wrong {wrong}; {len(answered) - new:,} answers of the old model, {new:,} of the new one\n")
    began, ended = teaching
    phases = {
        "before the teaching": [row[4] for row in answered if row[3] + row[4] < began],
        "during it": [row[4] for row in answered if row[3] + row[4] >= began and row[3] < ended],
        "after it": [row[4] for row in answered if row[3] >= ended],
        "all": [row[4] for row in answered],
    }
    print("| phase | requests | p50 | p99 | longest |\n|---|---|---|---|---|")
    for name, latencies in phases.items():
        if latencies:
            p50, p99, most = (f"{1000 * value:.0f} ms" for value in np.percentile(latencies, [50, 99, 100]))
            print(f"| {name} | {len(latencies):,} | {p50} | {p99} | {most} |")
    return int(lost > 0 or wrong > 0 or new == 0)


if __name__ == "__main__":
    sys.exit(main())
