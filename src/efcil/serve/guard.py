"""Who may ask: checks of every request before anything reads it, and headers that keep browsers careful.

In this order: the name the server was called by (another page could point its own name at this machine), the rate of
the client, the page that a change comes from (another page could post a form here), and the token where there is one.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import platform
import time
from collections import OrderedDict
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, RedirectResponse, Response

from efcil.serve.options import LOCAL_NAMES, ServeOptions
from efcil.serve.refusal import Refused

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from efcil.serve.metrics import Metrics

COOKIE = "efcil_session"
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
#: Reached without a token: they show nothing of the model.
OPEN = ("/health", "/login", "/page/style.css", "/page/icon.svg")
PAGES = ("/", "/docs")
MOST_CLIENTS = 10_000
#: What a wrong token costs, in requests.
WRONG_TOKEN = 20.0
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; media-src 'self' blob:; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
}


class Rates:
    """Requests per second and client: a bucket that fills at the rate and holds two seconds' worth."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait(self, client: str, cost: float = 1.0) -> float:
        """Take from a client's bucket; return 0, or the seconds after which it may ask again."""
        if self._rate <= 0:
            return 0.0
        now, most = self._clock(), max(1.0, 2 * self._rate)
        level, before = self._buckets.pop(client, (most, now))
        level = min(most, level + (now - before) * self._rate)
        allowed = level >= 1.0
        self._buckets[client] = (level - cost if allowed else level, now)
        while len(self._buckets) > MOST_CLIENTS:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1.0 - level) / self._rate


class Guard:
    """ASGI middleware: refuses what must not be answered, and counts everything."""

    def __init__(self, app: ASGIApp, options: ServeOptions, metrics: Metrics) -> None:
        self._app = app
        self._options = options
        self._metrics = metrics
        self._rates = Rates(options.limits.rate)
        self._names = {name.lower() for name in (*LOCAL_NAMES, options.host, *options.allowed_hosts)}
        self._wide = options.host in ("0.0.0.0", "::")
        if self._wide:
            self._names.add(platform.node().lower())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status, stream = time.perf_counter(), 500, False

        async def sending(message: Message) -> None:
            nonlocal status, stream
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                stream = headers.get("content-type", "").startswith("text/event-stream")
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            refusal = self._refusal(scope)
            await (self._app if refusal is None else refusal)(scope, receive, sending)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.add(route=route, method=scope["method"], status=str(status))
            if not stream:  # which lasts as long as a teaching
                self._metrics.latency.add(time.perf_counter() - start)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        client = (scope.get("client") or ("unknown", 0))[0]
        try:
            self._check_host(headers)
            self._check_rate(client)
            if scope["method"] not in SAFE_METHODS:
                _check_origin(headers)
            if self._options.token is not None and scope["path"] not in OPEN:
                return self._check_token(scope, headers, client)
        except Refused as refused:
            return JSONResponse({"error": str(refused)}, refused.status, refused.headers)
        return None

    def _check_host(self, headers: Headers) -> None:
        name = _host_name(headers.get("host", ""))
        if name in self._names or (self._wide and _is_address(name)):
            return
        raise Refused(
            421,
            "The server does not answer to this name. Open it by its address, or start it with --allowed-host and the "
            "name it is reached by.",
        )

    def _check_rate(self, client: str) -> None:
        wait = self._rates.wait(client)
        if wait > 0:
            after = {"Retry-After": str(max(1, round(wait)))}
            raise Refused(429, f"More than {self._options.limits.rate:g} requests a second. Ask more slowly.", after)

    def _check_token(self, scope: Scope, headers: Headers, client: str) -> Response | None:
        assert self._options.token is not None
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and same(given.strip(), self._options.token):
            return None
        if same(_cookie(headers), session(self._options.token)):
            return None
        if given:
            self._rates.wait(client, WRONG_TOKEN)  # guessing is slow
        if scope["path"] in PAGES and scope["method"] == "GET":
            return RedirectResponse("/login", 303)
        sentence = "The token is wrong." if given else "A token is needed: `Authorization: Bearer TOKEN`, or log in."
        raise Refused(401, sentence, {"WWW-Authenticate": "Bearer"})


def same(given: str, wanted: str) -> bool:
    """Compare secrets in a time that does not depend on where they differ."""
    return hmac.compare_digest(hashlib.sha256(given.encode()).digest(), hashlib.sha256(wanted.encode()).digest())


def session(token: str) -> str:
    """Return what the cookie of someone who has logged in holds: not the token, but something made from it."""
    return hmac.new(token.encode(), b"efcil session", "sha256").hexdigest()


def _cookie(headers: Headers) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return "" if found is None else found.value


def _check_origin(headers: Headers) -> None:
    """Refuse a change that another page asks for. Programs other than browsers send neither header."""
    origin = headers.get("origin")
    if origin is not None:
        scheme, _, asked = origin.lower().partition("://")
        default = {"http": ":80", "https": ":443"}.get(scheme, "")
        if asked and headers.get("host", "").lower().removesuffix(default) == asked.removesuffix(default):
            return
    elif headers.get("sec-fetch-site", "none") in ("same-origin", "none"):
        return
    raise Refused(403, "This request comes from another page, and would change something here. It is refused.")


def _host_name(host: str) -> str:
    """Return the name in a Host header, without its port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
