"""HTTP to a vLLM server whose policy is compared.

The key of a server that needs one is in VLLM_API_KEY, as vLLM itself has it.
"""

import json
import os
import urllib.error
import urllib.request
from typing import Any

from qarl.verify.findings import VerifyInputError

_SECONDS = 120.0
"""Timeout of a request; a server may be sampling before it answers."""
_LONGEST_REASON = 400
"""Upper bound on the part of an error's text that is read, in bytes."""
_LONGEST_ANSWER = 200
"""Upper bound on the part of an unexpected answer that an error quotes, in characters."""
_DEVELOPMENT = "VLLM_SERVER_DEV_MODE=1"
"""Environment variable with which a server has the paths that read its workers."""


def is_url(source: Any) -> bool:
    """Return whether a side is a server's URL."""
    return isinstance(source, str) and source.startswith(("http://", "https://"))


class VllmServer:
    """A vLLM server.

    Args:
        url: Base URL, with or without /v1.
    """

    def __init__(self, url: str):
        self.url = url
        self.why_not_called = ""
        """Why the last `call` returned None."""
        self._base = url.rstrip("/").removesuffix("/v1")

    def model(self) -> str:
        """Return the name of the model that is served. Raises `VerifyInputError` if the server does
        not answer as vLLM does.
        """
        answer = self.get("/v1/models")
        try:
            return answer["data"][0]["id"]
        except (KeyError, IndexError, TypeError) as error:
            raise VerifyInputError(
                f"server {self.url!r} lists no model at /v1/models; give the URL of a vLLM server,"
                " such as http://127.0.0.1:8000"
            ) from error

    def weight_version(self) -> str | None:
        """Return the version that the server names; None if it names none."""
        answer = self.get("/weight_info", missing=(404,))
        if not isinstance(answer, dict | None):
            raise self.unexpected("/weight_info", answer)
        return None if answer is None else answer.get("weight_version")

    def call(self, method: str, **arguments: Any) -> list[Any] | None:
        """Return the results of a method of the server's workers, one a worker; None if they have
        no such method.
        """
        body = {"method": method, "kwargs": arguments}
        answer = self.get("/collective_rpc", body, missing=(404, 405), lacks=method)
        if answer is None:
            return None
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list) or not results:
            raise self.unexpected("/collective_rpc", answer)
        return results

    def unexpected(self, path: str, answer: Any) -> VerifyInputError:
        """Return the error for an answer of another form than vLLM's or the worker extension's."""
        text = json.dumps(answer)
        text = text if len(text) <= _LONGEST_ANSWER else f"{text[:_LONGEST_ANSWER]}…"
        return VerifyInputError(
            f"server {self.url!r} answers {path} with {text}, which is of another form than that of"
            " vLLM and the worker extension; start it with the versions of vLLM and qarl that are"
            " installed here"
        )

    def get(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        missing: tuple[int, ...] = (),
        lacks: str = "",
    ) -> Any:
        """Return the answer to a request, from JSON; None if the server lacks what it asks for.

        Args:
            path: Path below the base URL.
            body: What is posted; None for a GET.
            missing: Statuses by which a server says that it has no such path.
            lacks: Method whose name an error about a missing attribute quotes.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {os.environ['VLLM_API_KEY']}"
        request = urllib.request.Request(self._base + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            text = error.read(_LONGEST_REASON).decode(errors="replace")
            if error.code in missing:
                self.why_not_called = f"it has no {path}: it was started without {_DEVELOPMENT}"
                return None
            if lacks and "has no attribute" in text and lacks in text:
                self.why_not_called = "it was started without the worker extension"
                return None
            remedy = "put its key into VLLM_API_KEY" if error.code in (401, 403) else text
            raise VerifyInputError(
                f"server {self.url!r} answers {path} with status {error.code}; {remedy}"
            ) from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise VerifyInputError(
                f"server {self.url!r} does not answer {path}: {reason}; check that the server is"
                " up, and its URL, such as http://127.0.0.1:8000"
            ) from error
