"""How long /metrics takes while clients hang: the real exporter's page of 8 ranks, 200 clients of each kind, then all kinds at once. Prints one table.

  python tests/bench/bench_server.py                 about half a minute
  python tests/bench/bench_server.py --clients 1000  more than may be connected: the oldest are pushed out meanwhile
  python tests/bench/bench_server.py --tls           the same by https, and clients that hang in the handshake (needs openssl)

The scraper is a process of its own, each scrape a new connection; the clients live in a third process, so that only the server's own threads share
the launcher's interpreter lock with the scrape. It scrapes for a while, then all clients come at one moment, then they hang: `arrival` is the worst scrape
of the first two seconds after that moment, `later` the worst one after. The bar is 50 ms. The first page of a launcher's life has a line of its own: it
compiles the templates, 0.1 s of CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

HOST = b"Host: localhost\r\n"
KINDS = {
    "nobody": [],
    "silent": [b""],
    "half a request": [b"GET /met"],
    "trickling": [b"GET /metrics HTTP/1.1\r\n" + HOST + b"X-A: "],
    "one client, first page": [b"GET / HTTP/1.1\r\n" + HOST + b"\r\n"],
    "not reading a page": [b"GET / HTTP/1.1\r\n" + HOST + b"\r\n"],
    "not reading 4 MB": [b"GET /big HTTP/1.1\r\n" + HOST + b"\r\n"],
    "scraping in a loop": [b"loop"],
}
TLS_KINDS = {"nobody": [], "silent": [b""], "half a hello": [b"\x16\x03\x01\x02"], "a hello, then a page": [b"tls"]}
BEFORE, AFTER = 20, 180
"""Scrapes of a line: before the clients come, and from then on."""
ARRIVAL_S = 2.0
BAR_S = 0.05
CLIENTS = r"""
import json, os, select, socket, ssl, sys, threading, time
port, count, kinds = int(sys.argv[1]), int(sys.argv[2]), [k.encode("latin-1") for k in json.loads(sys.argv[3])]
def connect():
    s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096); s.settimeout(20); s.connect(("127.0.0.1", port)); return s
def scrape():
    while True:
        try:
            s = connect(); s.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            while s.recv(65536): pass
        except OSError: pass
        time.sleep(0.1)
hanging, hellos, context = [], [], ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
print("ready", flush=True)
sys.stdin.readline()
for n in range(count if kinds else 0):
    kind = kinds[n % len(kinds)]
    if kind == b"loop":
        if n < 20 * len(kinds): threading.Thread(target=scrape, daemon=True).start()
        continue
    s = connect()
    if kind == b"tls":
        inward, outward = ssl.MemoryBIO(), ssl.MemoryBIO()
        session = context.wrap_bio(inward, outward)
        try: session.do_handshake()
        except ssl.SSLWantReadError: pass
        s.sendall(outward.read()); hellos.append((s, session, inward, outward))
        continue
    s.sendall(kind); hanging.append([s, kind])
while hellos:   # as each is answered: the rest of its handshake, and its request
    for one in [h for h in hellos if h[0] in select.select([h[0] for h in hellos], [], [])[0]]:
        s, session, inward, outward = one
        try:
            inward.write(s.recv(65536)); session.do_handshake()
            session.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        except ssl.SSLWantReadError: continue
        except OSError: pass
        else: s.sendall(outward.read())
        hellos.remove(one); hanging.append([s, b"\r\n\r\n"])
while True:   # who is cut comes again; who trickles trickles
    time.sleep(0.2)
    for entry in hanging:
        s, kind = entry
        try:
            if kind.endswith(b": "): s.send(b"a")
            gone = kind.startswith((b"GET /met", b"")) and not kind.endswith(b"\r\n\r\n") and select.select([s], [], [], 0)[0]
        except OSError:
            gone = True
        if gone:
            s.close()
            try:
                entry[0] = connect(); entry[0].sendall(kind)
            except OSError: pass
"""
SCRAPER = r"""
import http.client, json, ssl, sys, time
port, count, ca = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
context = ssl.create_default_context(cafile=ca) if ca else None
took, failed, size = [], 0, 0
for number in range(count):
    if number == int(sys.argv[4]): print("now", flush=True)
    began = time.perf_counter()
    try:
        c = http.client.HTTPSConnection("localhost", port, timeout=20, context=context) if ca else http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        c.request("GET", "/metrics"); answer = c.getresponse(); size = len(answer.read()); failed += answer.status != 200; c.close()
    except OSError:
        failed += 1
    took.append((began, time.perf_counter() - began))
    time.sleep(0.02)
print(json.dumps([took, failed, size]))
"""


@contextmanager
def clients(port: int, count: int, kinds: list[bytes]) -> Iterator[Callable[[], None]]:
    """Clients that are ready to come; what lets them come."""
    command = [sys.executable, "-c", CLIENTS, str(port), str(count), json.dumps([kind.decode("latin-1") for kind in kinds])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None

    def come() -> None:
        process.stdin.write(b"\n")
        process.stdin.flush()

    try:
        process.stdout.readline()
        yield come
    finally:
        process.kill()
        process.communicate()


def certificate(folder: str) -> tuple[str, str]:
    cert, key = f"{folder}/cert.pem", f"{folder}/key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run([*command.split(), "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--tls", action="store_true")
    arguments = parser.parse_args()

    import build_status

    from rankwatch.export.prometheus import Exporter
    from rankwatch.report import status as page
    from rankwatch.serve import tls
    from rankwatch.serve.server import Response, Server
    from rankwatch.serve.shared import Shared

    picture, exporter = build_status.stuck_status(), Exporter("default")
    big = b"x" * 4_000_000
    routes = {
        "/": Shared(lambda request: Response(page.render(picture, request.nonce), "text/html; charset=utf-8"), lambda: picture),
        "/big": lambda request: Response(big),
        "/metrics": lambda request: Response(*exporter.render(picture, request.accept)),
    }
    with tempfile.TemporaryDirectory() as folder:
        cert, key = certificate(folder) if arguments.tls else ("", "")
        loads = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before"
        print(f"{arguments.clients} clients, {BEFORE + AFTER} scrapes each line, {loads}{', TLS' if cert else ''}")
        print(f"{'clients':24} {'p50 ms':>8} {'p95 ms':>8} {'arrival':>8} {'later':>8} {'over 50':>8} {'failed':>7} {'threads':>8} {'CPU s':>7}")
        ways = TLS_KINDS if cert else KINDS
        everything = [kind for kinds in ways.values() for kind in kinds]
        for name, kinds in {**ways, "all of them": everything}.items():
            server = Server("127.0.0.1:0", routes, tls=tls.load(cert, key) if cert else None)
            assert server.start(), server.notice
            with clients(server.port, 1 if name.startswith("one client") else arguments.clients, kinds) as come:
                threads, cpu_s = 0, time.process_time()
                command = [sys.executable, "-c", SCRAPER, str(server.port), str(BEFORE + AFTER), cert, str(BEFORE)]
                scraper = subprocess.Popen(command, stdout=subprocess.PIPE)
                assert scraper.stdout is not None
                scraper.stdout.readline()
                came_at = time.perf_counter()
                come()
                while scraper.poll() is None:
                    threads = max(threads, threading.active_count())
                    time.sleep(0.1)
                took, failed, _ = json.loads(scraper.communicate()[0])
                spent = time.process_time() - cpu_s
            server.stop()
            arrival = max(seconds for began, seconds in took[BEFORE:] if began - came_at < ARRIVAL_S)
            later = max((seconds for began, seconds in took if began - came_at >= ARRIVAL_S), default=0.0)
            every = sorted(seconds for _, seconds in took)
            p50, p95 = (1000 * every[int(share * (len(every) - 1))] for share in (0.5, 0.95))
            over = sum(seconds > BAR_S for seconds in every)
            figures = f"{p50:8.1f} {p95:8.1f} {1000 * arrival:8.1f} {1000 * later:8.1f} {over:8} {failed:7} {threads:8} {spent:7.1f}"
            print(f"{name:24} {figures}", flush=True)


if __name__ == "__main__":
    main()
