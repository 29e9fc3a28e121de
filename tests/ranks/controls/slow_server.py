"""An object store over a thin line: takes one PUT at argv[1] bytes a second, answers 200, ends. Prints its port first."""

import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer


class Store(BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        left = int(self.headers["Content-Length"])
        while left > 0:
            piece = len(self.rfile.read(min(left, 20_000)))
            left -= piece
            time.sleep(piece / float(sys.argv[1]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *words: object) -> None:
        pass


server = HTTPServer(("127.0.0.1", 0), Store)
print(server.server_port, flush=True)
server.handle_request()
