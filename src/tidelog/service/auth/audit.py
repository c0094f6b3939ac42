"""The audit log: one structured record for each decision that matters, under the logger `tidelog.audit`.

    event=access what=fetch principal=User:alice resource=topic:shop/orders permission=read allowed=true client=10.0.0.7
    event=authentication principal=User:mallory method=plain allowed=false client=10.0.0.9

Invariants
- Authentications and administration are recorded one by one. Reading and writing is recorded when it begins, and every
  ten minutes while it goes on; a refusal that a client repeats, once in ten seconds: there is never a line per message.
- A record has names and addresses only. What a client sent as a proof is never part of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from tidelog.events import tell
from tidelog.service.auth.access import Permission, Principal, Resource

_logger = logging.getLogger("tidelog.audit")
_ALLOWED_SECONDS = 600.0
_REFUSED_SECONDS = 10.0
_KEPT = 20_000
_LONGEST_NAME = 250


class Audit:
    """Writes the records of one server."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now` is a monotonic time in seconds."""
        self._now = now
        self._due: dict[tuple[str, str, Resource, bool, str], float] = {}

    def access(
        self,
        principal: Principal,
        what: str,
        permission: Permission | None,
        resource: Resource,
        *,
        allowed: bool,
        client: str,
    ) -> None:
        """Something was allowed or refused. To see that something exists is recorded when it is refused."""
        if permission is None and allowed:
            return
        if (permission is not Permission.ADMIN or not allowed) and not self._is_due(
            (principal.name, what, resource, allowed, client), _ALLOWED_SECONDS if allowed else _REFUSED_SECONDS
        ):
            return
        tell(
            _logger,
            "access",
            what=what,
            principal=str(principal),
            resource=_shown(resource),
            permission=permission,
            allowed=allowed,
            client=client,
        )

    def request(self, principal: Principal, what: str, resource: Resource, status: int, client: str) -> None:
        """A request of HTTP that was refused, or that changes something. `what` is its route."""
        allowed = status not in (401, 403)
        if self._is_due((principal.name, what, resource, allowed, client), 0.0 if allowed else _REFUSED_SECONDS):
            tell(
                _logger,
                "access",
                what=what,
                principal=str(principal),
                resource=_shown(resource),
                allowed=allowed,
                status=status,
                client=client,
            )

    def _is_due(self, key: tuple[str, str, Resource, bool, str], seconds: float) -> bool:
        now = self._now()
        if now < self._due.get(key, 0.0):
            return False
        if len(self._due) >= _KEPT:
            self._due = {other: due for other, due in self._due.items() if now < due}
            if len(self._due) >= _KEPT:
                self._due.clear()
        self._due[key] = now + seconds
        return True

    def authentication(self, name: str, method: str, *, allowed: bool, client: str, reason: str | None = None) -> None:
        """Somebody proved who they are, or did not."""
        principal = f"User:{name[:_LONGEST_NAME]}" if name else None
        tell(
            _logger, "authentication", principal=principal, method=method, allowed=allowed, client=client, reason=reason
        )

    def changed(self, principal: str, what: str, subject: str, client: str | None = None) -> None:
        """A user, a token or a grant was changed."""
        tell(_logger, "accounts_changed", what=what, principal=principal, subject=subject, client=client)


def _shown(resource: Resource) -> str:
    return f"{resource.kind}:{resource.name[:_LONGEST_NAME]}" if resource.name else str(resource)
