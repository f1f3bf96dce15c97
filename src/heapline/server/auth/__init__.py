"""Authentication and rights: keys, users, tokens, scopes and TLS.

The rest of the server uses `Guard` (principals.py). Nothing in this package knows a request or a payload.
"""

from heapline.contract.call import Right
from heapline.server.auth.guard import DirectoryGuard, read_admin_key
from heapline.server.auth.principals import LOCAL, Guard, NoAuthGuard, Principal, Scope, parse_scope
from heapline.server.auth.secret import Secret, redact

__all__ = [
    "LOCAL",
    "DirectoryGuard",
    "Guard",
    "NoAuthGuard",
    "Principal",
    "Right",
    "Scope",
    "Secret",
    "parse_scope",
    "read_admin_key",
    "redact",
]
