"""Who is calling, and what may they do? Keys, users, tokens, limits, confirmations, the audit log and TLS.

The faces of the server code against `Guard` in principal.py; nothing in this room knows a socket or a payload.
"""

from heapline.server.auth.audit import AuditLog
from heapline.server.auth.confirm import Confirmations
from heapline.server.auth.guard import DirectoryGuard, read_admin_key
from heapline.server.auth.limits import Limiter, Limits
from heapline.server.auth.principal import LOCAL, Action, Everybody, Guard, Principal, Scope, parse_scope
from heapline.server.auth.secret import Secret, redact

__all__ = [
    "LOCAL", "Action", "AuditLog", "Confirmations", "DirectoryGuard", "Everybody", "Guard", "Limiter", "Limits",
    "Principal", "Scope", "Secret", "parse_scope", "read_admin_key", "redact",
]  # fmt: skip
