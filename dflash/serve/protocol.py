"""uvicorn's protocol over h11, which takes a malformed body for the end of a connection."""

from __future__ import annotations

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class Protocol(H11Protocol):
    """Says 400 where that can still be said, and in any case that the client is gone.

    uvicorn's own sends 400 also behind a complete reply (of a request that was refused unread, say)
    and lets a route reply behind the 400: either is a traceback in the log.
    """

    def send_400_response(self, msg: str) -> None:
        """End the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        self.transport.close()
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
