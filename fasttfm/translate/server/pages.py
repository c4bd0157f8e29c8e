"""Pages whose own scripts and styles run, and nothing else: not even what a translation might put into one."""

import base64
import hashlib
import re

from starlette.responses import HTMLResponse

_RULES = ("default-src 'none'", "connect-src 'self'", "form-action 'self'", "base-uri 'none'", "frame-ancestors 'none'")


def html_response(text: str) -> HTMLResponse:
    """A page with the Content-Security-Policy that allows its own blocks by their hashes; no page may frame it."""
    rules = [*_RULES]
    for kind in ("script", "style"):
        hashes = [
            f"'sha256-{base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()}'"
            for block in re.findall(f"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        ]
        if hashes:
            rules.append(f"{kind}-src {' '.join(hashes)}")
    return HTMLResponse(
        text,
        headers={
            "Content-Security-Policy": "; ".join(rules),
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        },
    )
