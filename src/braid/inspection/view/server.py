"""The page over HTTP, for this machine alone.

The server listens on 127.0.0.1. Its address has a random token, which other users of the machine and pages of
other origins do not know; the Host header must name this machine, so that no other name can be made to
resolve to it (DNS rebinding). Its policy lets the page load its own files and nothing else. It only reads.
"""

from __future__ import annotations

import gzip
import hmac
import logging
import re
import secrets
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from braid.report.files import to_json

from .answers import Answers, BadQuestion, Missing

logger = logging.getLogger(__name__)

PAGE = files("braid.inspection.view")
SCRIPTS = ("base.js", "curves.js", "tokens.js", "rollouts.js", "change.js", "timeline.js", "main.js")
"""The page's own modules, in the order of what they import."""
_ASSETS = {name: f"app/{name}" for name in (*SCRIPTS, "page.css")} | {
    name: f"vendor/{name}" for name in ("uPlot.iife.min.js", "uPlot.min.css", "htm_preact.js")
}
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json; charset=utf-8",
    ".mp4": "video/mp4",
    ".gif": "image/gif",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".webp": "image/webp",
    ".bmp": "image/bmp",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; media-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Server(ThreadingHTTPServer):
    """Serves the page about some runs; `port` 0 takes a free one. Raises OSError if the port is taken."""

    daemon_threads = True

    def __init__(self, answers: Answers, port: int = 0) -> None:
        self.answers = answers
        self.token = secrets.token_urlsafe(18)
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        """The page's address."""
        return f"http://127.0.0.1:{self.server_address[1]}/{self.token}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    server_version = "braid"
    sys_version = ""
    timeout = 60

    def do_GET(self) -> None:
        host = re.sub(r":\d+$", "", self.headers.get("Host", ""))
        if host not in ("127.0.0.1", "localhost"):
            self._refuse(403, "the Host header must be 127.0.0.1 or localhost")
            return
        address = urlsplit(self.path)
        token, _, path = address.path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(403, "the address lacks the token that braid view printed")
            return
        try:
            self._answer([unquote(part) for part in path.split("/")], address.query)
        except BadQuestion as error:
            self._refuse(400, str(error))
        except Missing as error:
            self._refuse(404, str(error.args[0]))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _answer(self, path: list[str], query: str) -> None:
        match path:
            case [""]:
                self._asset(PAGE.joinpath("app/page.html").read_bytes(), ".html")
            case ["assets", name] if name in _ASSETS:
                self._asset(PAGE.joinpath(_ASSETS[name]).read_bytes(), name[name.rindex(".") :])
            case ["api", question]:
                values = dict(parse_qsl(query, keep_blank_values=True, max_num_fields=30))
                self._send(to_json(self.server.answers(question, values)).encode(), ".json")
            case ["files", run, kind, name]:
                file = self.server.answers.file(run, kind, name)
                self._send(file.read_bytes(), file.suffix)
            case _:
                raise Missing("there is no such address")

    def _asset(self, body: bytes, suffix: str) -> None:
        extra = {}
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            body, extra = gzip.compress(body), {"Content-Encoding": "gzip"}
        self._reply(200, body, _TYPES[suffix], extra)

    def _send(self, body: bytes, suffix: str) -> None:
        """Send a body, or the one range of it that was asked for: browsers seek in videos by ranges."""
        size, status, extra = len(body), 200, {"Accept-Ranges": "bytes"}
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(match[1]), min(int(match[2] or size), size - 1)
            if first > last:
                self._refuse(416, "the range is outside the file")
                return
            body, status = body[first : last + 1], 206
            extra["Content-Range"] = f"bytes {first}-{last}/{size}"
        self._reply(status, body, _TYPES[suffix], extra)

    def _refuse(self, status: int, message: str) -> None:
        self._reply(status, to_json({"error": message}).encode(), _TYPES[".json"], {})

    def _reply(self, status: int, body: bytes, kind: str, extra: dict[str, str]) -> None:
        self.send_response(status)
        headers = {**_HEADERS, **extra, "Content-Type": kind, "Content-Length": str(len(body))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)
