"""`rankwatch targets`: the scrape targets of all jobs that write into one --sd-dir, printed, or served to Prometheus as http_sd."""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rankwatch import shown
from rankwatch.cli import fail, say
from rankwatch.config import Options, accepted
from rankwatch.export import discovery_files as files

if TYPE_CHECKING:
    from rankwatch.serve.server import Request, Response

FLAGS = ("--listen", "--token-file", "--sd-dir")
PATH = "/targets"
EXIT_NOTHING_FOUND, EXIT_CANNOT = 3, 4
LOOK_S = 1.0  # several Prometheus servers within it cost one look
MAX_SAID = 20
EPILOG = f"""\
Each launcher with --sd-dir DIR keeps a file there, renewed every {files.REFRESH_S:.0f} s and removed at the end. One that was not renewed
for {files.STALE_S:.0f} s has no launcher any more (kill -9, a dead node): it is never served, and is removed where this user may do that.
So one service of the platform is enough for all jobs:

  rankwatch targets --listen 0.0.0.0:27400 --token-file FILE /shared/rankwatch-sd

  scrape_configs:
    - job_name: rankwatch
      honor_labels: true
      http_sd_configs: [{{url: 'http://HOST:27400{PATH}', refresh_interval: 15s, authorization: {{credentials_file: FILE}}}}]

Asked every 15 s, a killed launcher's target is gone within {files.gone_within_s(15.0):.0f} s. An unreadable folder is
answered with 503: Prometheus keeps what it had.
Labels: job_id, node; for relabelling __meta_rankwatch_label_NAME of each --label.
Exit codes: 0 printed, or served until SIGTERM or Ctrl-C; 2 wrong usage; 3 no target there; 4 the address cannot be had.
"""


class Targets:
    """What one folder offers now. Safe to call from several threads. clock: monotonic seconds; wall: where the folder cannot tell its own time."""

    def __init__(
        self,
        folder: str,
        stale_s: float = files.STALE_S,
        tell: Callable[[str], None] = say,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._stale_s = stale_s
        self._tell = tell
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self._own = os.path.join(folder, f".rankwatch_targets.{os.getpid()}")
        self._looked_at: float | None = None
        self._found: list[dict[str, Any]] = []
        self._said: set[str] = set()

    def look(self) -> list[dict[str, Any]]:
        """The target groups of all living launchers. OSError where the folder cannot be read."""
        with self._lock:
            now = self._clock()
            if self._looked_at is None or now - self._looked_at >= LOOK_S:
                self._found = self._look()
                self._looked_at = now
            return self._found

    def close(self) -> None:
        files.remove(self._own)

    def _look(self) -> list[dict[str, Any]]:
        times = files.listing(self._folder)
        gone = files.stale(times, self._folder_time(), self._stale_s)
        for name in gone:
            files.remove(os.path.join(self._folder, name))
        found, refused = files.read(self._folder, sorted(times.keys() - set(gone)))
        for name, why in refused.items():
            if name not in self._said and len(self._said) < MAX_SAID:
                self._said.add(name)
                self._tell(f"{shown.one_line(name)} is left out: {shown.one_line(why)}")
        return found

    def _folder_time(self) -> float:
        """What the folder's file system calls now: the time of a file that was renewed just now. Our own clock where nothing may be written there."""
        try:
            return files.renew(self._own)
        except FileNotFoundError:
            pass
        except OSError:
            return self._wall()
        try:
            os.close(os.open(self._own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
            return files.renew(self._own)
        except OSError:
            return self._wall()


def main(argv: Sequence[str], options: Options) -> int:
    """See EPILOG for the exit codes."""
    parser = argparse.ArgumentParser(
        prog="rankwatch targets",
        usage="rankwatch targets [--listen HOST:PORT [--token-file FILE]] [DIR]",
        description="The scrape targets of the jobs that were started with --sd-dir DIR, as Prometheus reads them: on stdout, or served for http_sd.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", nargs="?", metavar="DIR", default=options.sd_dir, help="the folder (default: that of --sd-dir)")
    parser.add_argument("--listen", metavar="HOST:PORT", default="", help=f"serve them at http://HOST:PORT{PATH}; beyond loopback with a token")
    parser.add_argument("--token-file", metavar="FILE", default=options.token_file, help="file with the token that Prometheus sends (credentials_file)")
    parser.add_argument(
        "--stale-after",
        metavar="TIME",
        default=str(files.STALE_S),
        help=f"a file that was not renewed for so long has no launcher (default: {files.STALE_S:g} s)",
    )
    arguments = parser.parse_args(argv)
    if not arguments.folder:
        return fail("rankwatch targets needs DIR, the folder that the jobs have as --sd-dir")
    folder = os.path.abspath(os.path.expanduser(arguments.folder))
    if not os.path.isdir(folder):
        return fail(f"{folder} is no directory; it is the one that the jobs have as --sd-dir")
    try:
        targets = Targets(folder, accepted.duration(arguments.stale_after))
    except ValueError as error:
        return fail(f"--stale-after {arguments.stale_after!r} is not accepted; it takes {error}")
    try:
        return _serve(targets, folder, arguments.listen, arguments.token_file) if arguments.listen else _print(targets)
    except OSError as error:
        return fail(f"{folder} cannot be read: {error.strerror or error}")
    finally:
        targets.close()


def _print(targets: Targets) -> int:
    found = targets.look()
    print(json.dumps(found, indent=1))
    return 0 if found else EXIT_NOTHING_FOUND


def _serve(targets: Targets, folder: str, listen: str, token_file: str) -> int:
    from rankwatch.serve.address import holder, parse
    from rankwatch.serve.http import is_loopback
    from rankwatch.serve.server import Server
    from rankwatch.serve.token import read_token

    try:
        host, port = parse(listen)
        token = read_token(token_file) if token_file else None
    except ValueError as error:
        return fail(str(error) if str(error).startswith("--listen") else f"--token-file {error}")
    if token is None and not is_loopback(host):
        return fail(f"--listen {listen} is reached from other machines and needs --token-file FILE; make one, such as: openssl rand -hex 16 > FILE")
    over = threading.Event()
    server = Server(listen, {PATH: lambda request: _answer(targets, request), "/healthz": _healthy}, token)
    url = server.start()
    try:
        if not url:
            say(f"error: {server.notice}")
            return EXIT_CANNOT
        if port and server.port != port:  # Prometheus asks at the one that was given
            say(f"error: --listen {listen}: the port is taken by {holder(port)}; end that, or choose another one and tell Prometheus")
            return EXIT_CANNOT
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: over.set())
        say(f"targets of {folder} at {url}{PATH}, for http_sd_configs; {len(targets.look())} now")
        over.wait()
    finally:
        server.stop()
    return 0


def _answer(targets: Targets, _request: Request) -> Response:
    from rankwatch.serve.server import Response

    try:
        found = targets.look()
    except OSError as error:
        return Response(f"the folder cannot be read: {error.strerror or error}\n", status=503)
    return Response(json.dumps(found), "application/json")


def _healthy(_request: Request) -> Response:
    from rankwatch.serve.server import Response

    return Response("ok\n")
