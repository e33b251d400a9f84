"""What a server is started with: which model, where it listens, who may use it, and the limits it keeps."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from efcil.errors import SettingsError

#: Names under which a server that listens to this machine alone is reached.
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
SHORTEST_TOKEN = 16


@dataclass(frozen=True)
class Limits:
    """What one request, one client and all of them together may ask for."""

    #: Bytes of one uploaded image.
    upload_bytes: int = 20 << 20
    #: Pixels of one image, from its header, before it is decoded.
    pixels: int = 50_000_000
    #: Images of one prediction request.
    images: int = 64
    #: Images of one teaching.
    teaching_images: int = 1000
    #: Requests per second and client; 0 for any number. Twice as many may come at once.
    rate: float = 100.0
    #: Images that may wait to be scored.
    queue: int = 512
    #: Seconds for a request: until its body has arrived, and until its answer is ready.
    seconds: float = 30.0

    @property
    def request_bytes(self) -> int:
        """Bytes of all images of one prediction."""
        return 4 * self.upload_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the images of all predictions that are in memory at the same time."""
        return 32 * self.upload_bytes

    @property
    def teaching_seconds(self) -> float:
        """Seconds until all pictures of a teaching must have arrived."""
        return 20 * self.seconds


@dataclass(frozen=True)
class ServeOptions:
    """Everything that `efcil serve` can be started with."""

    folder: Path
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    device: str = "auto"
    #: Other names under which the server is reached, such as that of a proxy.
    allowed_hosts: tuple[str, ...] = ()
    #: Images that are less typical than this share of the known ones are called unknown.
    unknown: float = 0.05
    checkpoint_steps: int | None = None
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if not 0 <= self.unknown < 1:
            raise SettingsError(f"--unknown must be a share from 0 to below 1, but it is {self.unknown}.")
        if not 0 <= self.port <= 65535:
            raise SettingsError(f"--port must be a number from 0 to 65535, but it is {self.port}.")
        if self.token is None and not is_local(self.host):
            raise SettingsError(
                f"{self.host} can be reached from other machines, and everyone there could use and teach the model. "
                "Give a token with --token or EFCIL_TOKEN, or leave --host out to serve this machine alone."
            )
        if self.token is not None and (len(self.token) < SHORTEST_TOKEN or not self.token.isascii()):
            raise SettingsError(
                f"The token must have at least {SHORTEST_TOKEN} plain characters, so that it cannot be guessed. "
                "`python -c 'import secrets; print(secrets.token_urlsafe())'` makes one."
            )


def is_local(host: str) -> bool:
    """Return whether an address can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
