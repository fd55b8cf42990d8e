"""The Python client: streams at reading pace whose consumption the server hears of. See docs/clients.md.

Owns the names users import. Invariant: importing it needs httpx and the standard library, no SGLang and no torch.
"""

from .answer import Piece
from .client import AsyncClient, Client
from .errors import MissingExtra, RequestRefused, StreamBroken, StreamError, TokenFlowError
from .pacing import Stalls
from .tasks import AsyncStream
from .threads import Stream
from .wrapper import paced

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Client",
    "MissingExtra",
    "Piece",
    "RequestRefused",
    "Stalls",
    "Stream",
    "StreamBroken",
    "StreamError",
    "TokenFlowError",
    "paced",
]
