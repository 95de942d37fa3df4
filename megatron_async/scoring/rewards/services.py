"""Provides the rewards that call a service over HTTP: `http` and `judge`.

`http` calls a service that scores; `judge` asks a language model to score by a rubric.

Invariants
- The rewards are asynchronous and never block, so that hundreds of scores share one process and one
  pool of connections.
- A request that the service refuses temporarily (status 429 or 5xx), or that cannot reach the
  service, is repeated with growing pauses, within the time limit of the score. After the last try,
  the service counts as unavailable. So does, without another try, a service whose reply has any
  other error status, is too large or is not JSON. This is not the response's fault, so the setting
  `task.on_scorer_timeout` decides whether the trajectory gets the score 0, is generated again, or
  is dropped.
- A redirect after which the request would be sent without its body counts as a failure, because the
  reply would not be a score of the response.
- The address is used exactly as the setting gives it. The proxy variables of the environment are
  respected, but never for an address of this machine.
"""

import asyncio
import ipaddress
import json
import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Final, Literal
from urllib.request import getproxies_environment, proxy_bypass

import aiohttp
from pydantic import Field, field_validator
from yarl import URL

from megatron_async.config.base import Settings
from megatron_async.config.reward import ScorerSettings
from megatron_async.errors import UserError, short_repr
from megatron_async.scoring.rewards.sample import Returned, Sample, Unavailable

_FIRST_PAUSE_SECONDS: Final = 0.5
_LONGEST_PAUSE_SECONDS: Final = 30.0
_MAX_REPLY_MIB: Final = 4
# Matches a line, or the end of a line after a sentence, that states a score, such as
# "**Final score (0-10):** 7/10".
_SCORE: Final = re.compile(
    r"(?:^|[.!?;]\s)[\s*_#>`-]*(?:(?:final|overall|total)\s+)?score[\s*_`]*(?:\([^()\n]*\))?"
    r"[\s*_`]*[:=\uff1a][ \t*_`]*(?P<stated>[^\n]*)$",
    re.IGNORECASE | re.MULTILINE,
)
_MARKS: Final = re.compile(
    r"(?P<marks>\d+\.?\d*|\.\d+)[\s*_`]*(?:(?:/|out of)[\s*_`]*(?P<full>\d+\.?\d*))?[\s*_`.]*",
    re.IGNORECASE,
)
_MILLION: Final = 1e6
Asynchronous = Callable[[Sample], Awaitable[Returned]]
"""An asynchronous reward function of one sample."""


class JsonPoster:
    """HTTP client that posts JSON to a service, repeats failed requests, and reads JSON replies.

    A client belongs to one event loop.
    """

    def __init__(self, api_key_env: str, retries: int) -> None:
        """Create a client; connect to nothing yet.

        Args:
            api_key_env: Name of the environment variable with a bearer token; empty for none.
            retries: Number of additional tries of a request that failed temporarily.

        Raises:
            UserError: If the environment variable does not exist.
        """
        self._headers = {}
        self._retries = retries
        self._opened: AsyncGenerator[aiohttp.ClientSession] | None = None
        self._session: aiohttp.ClientSession | None = None
        if api_key_env:
            if api_key_env not in os.environ:
                raise UserError(
                    f"api_key_env is {api_key_env!r}; there is no such environment variable. Set it"
                    " to the service's key, or change api_key_env."
                )
            self._headers["Authorization"] = f"Bearer {os.environ[api_key_env]}"

    async def post(self, url: str, body: dict[str, Any]) -> Any:
        """Post `body` as JSON to `url`, with retries; return the decoded JSON of the reply.

        Raises:
            Unavailable: If the last try failed, or the service refused the request for good.
        """
        address, proxy = URL(url, encoded="%" in url and url.isascii()), proxy_of(url)
        if self._session is None:  # Created here, because it needs a running event loop.
            self._opened = _session(self._headers)
            self._session = await anext(self._opened)
        problem = ""
        for number in range(self._retries + 1):
            pause = min(_FIRST_PAUSE_SECONDS * 2**number, _LONGEST_PAUSE_SECONDS)
            try:
                async with self._session.post(address, json=body, proxy=proxy) as reply:
                    content = await _content_of(reply)
                    if reply.status < 300:
                        return json.loads(content)
                    problem = f"status {reply.status}: {content.decode(errors='replace')[:200]}"
                    if reply.status != 429 and reply.status < 500:
                        break
                    after = reply.headers.get("Retry-After", "")
                    pause = float(after) if after.isdigit() else pause
            except (aiohttp.ClientError, OSError) as error:
                problem = f"{type(error).__name__}: {error}"
            except (ValueError, RecursionError) as error:
                problem = f"the reply is not JSON: {error}"
                break
            if number < self._retries:
                await asyncio.sleep(pause)
        raise Unavailable(f"{url}: {problem}")

    async def close(self) -> None:
        """Close the HTTP client's connections, if it has opened any."""
        if self._opened is not None:
            await self._opened.aclose()


async def _session(headers: Mapping[str, str]) -> AsyncGenerator[aiohttp.ClientSession]:
    """Yield one HTTP session that sends `headers`; close the session when the generator is closed.

    A generator ensures that the session is closed: an event loop that ends closes all generators.
    """
    connector, trace = aiohttp.TCPConnector(limit=0), aiohttp.TraceConfig()
    trace.on_request_redirect.append(_check_redirect)
    async with aiohttp.ClientSession(
        connector=connector, headers=headers, trace_configs=[trace]
    ) as session:
        yield session


async def _check_redirect(
    _session: aiohttp.ClientSession, _context: Any, found: aiohttp.TraceRequestRedirectParams
) -> None:
    """Raise an exception before the HTTP client follows a redirect without the request's body.

    Raises:
        Unavailable: If the redirect's status is neither 307 nor 308. With any other status, HTTP
            clients drop the body.
    """
    location = found.response.headers.get("Location")
    if location is not None and found.response.status not in (307, 308):
        target = found.url.join(URL(location))
        raise Unavailable(f"{found.url} redirects to {target} without the request's body")


def below(url: str, path: str) -> str:
    """Return the URL of `path` below a service's base `url`; the query of `url` is kept."""
    base, mark, query = url.partition("?")
    return f"{base.rstrip('/')}/{path}{mark}{query}"


def proxy_of(url: str) -> str | None:
    """Return the URL of the HTTP proxy to use for `url`, from the environment; None for no proxy.

    The variables are `http_proxy`, `https_proxy`, `all_proxy` and `no_proxy`, in lower or upper
    case. Addresses of this machine never use a proxy.

    Raises:
        UserError: If the proxy's protocol is not HTTP.
    """
    parsed, proxies = URL(url), getproxies_environment()
    host = parsed.host or ""
    proxy = proxies.get(parsed.scheme) or proxies.get("all") or ""
    if not proxy or _is_loopback(host) or proxy_bypass(f"{host}:{parsed.port}"):
        return None
    if any(_is_in(host, network.strip()) for network in proxies.get("no", "").split(",")):
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    if not proxy.lower().startswith(("http://", "https://")):
        raise UserError(
            f"the environment names the proxy {proxy} for {url}; only HTTP proxies are supported. "
            f"Set {parsed.scheme}_proxy to an HTTP proxy, or add {host} to no_proxy."
        )
    return proxy


def _is_loopback(host: str) -> bool:
    """Return whether a host name or IP address means this machine, without looking it up."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    mapped = getattr(address, "ipv4_mapped", None) or address
    return bool(mapped.is_loopback or mapped.is_unspecified)


def _is_in(host: str, network: str) -> bool:
    """Return whether the IP address `host` is in `network`, which is written as 10.0.0.0/8.

    The result is False if `host` is a name or `network` has any other form.
    """
    try:
        return "/" in network and ipaddress.ip_address(host) in ipaddress.ip_network(network, False)
    except ValueError:
        return False


async def _content_of(reply: aiohttp.ClientResponse) -> bytes:
    """Read and return the whole decompressed body of an HTTP reply.

    Raises:
        Unavailable: If the body is larger than `_MAX_REPLY_MIB`.
    """
    try:
        await reply.content.readexactly((_MAX_REPLY_MIB << 20) + 1)
    except asyncio.IncompleteReadError as error:
        return error.partial
    raise Unavailable(f"{reply.url}: the reply has more than {_MAX_REPLY_MIB} MiB")


class _Service(Settings):
    """Settings that the rewards `http` and `judge` share."""

    url: str
    """Address of the service, with http:// or https://."""
    api_key_env: str = ""
    """Name of the environment variable with the service's key (a bearer token). Empty: no key."""
    retries: int = Field(3, ge=0)
    """Number of additional tries of a request that failed temporarily."""

    @field_validator("url")
    @classmethod
    def _is_address(cls, value: str) -> str:
        """Return the address unchanged; raise ValueError if it is not an HTTP or HTTPS address."""
        if not re.match(r"https?://[^/\s]+", value):
            raise ValueError(f"url is {value!r}; it must begin with http:// or https://")
        return value

    def _poster(self) -> JsonPoster:
        """Return a new HTTP client for the service.

        Raises:
            UserError: If the service's key is missing, or the proxy for it is not an HTTP proxy.
        """
        proxy_of(self.url)  # Raises for an unsupported proxy before any response is scored.
        return JsonPoster(self.api_key_env, self.retries)


class Http(_Service):
    """Scores with the number that an HTTP service returns for a response.

    With the format `plain`, the service gets `prompt`, `response`, `answer` and `metadata`, and
    returns a number or an object with `score` and named components. With `sglang`, the service is
    a reward model that SGLang serves, and is called at `/classify`.
    """

    format: Literal["plain", "sglang"] = "plain"
    """Format of the requests and replies."""
    template: str = "{prompt}\n{response}"
    """Text that the reward model reads, with the format `sglang`."""

    def build_scorer(self, settings: ScorerSettings, limit_seconds: float) -> Asynchronous:
        """Return an asynchronous function that scores one sample by a request to the service.

        Raises:
            UserError: If the service's key is missing, or the proxy for it is not an HTTP proxy.
        """
        post, address = self._poster().post, below(self.url, "classify")

        async def plain(sample: Sample) -> Returned:
            """Post the response and its row; return the service's score and components."""
            row = {"prompt": sample.prompt, "response": sample.response, "answer": sample.answer}
            found = await post(self.url, {**row, "metadata": dict(sample.metadata)})
            if isinstance(found, dict) and "score" in found:
                return found.pop("score"), found
            return found  # type: ignore[no-any-return]

        async def sglang(sample: Sample) -> Returned:
            """Post the filled template to SGLang's reward model; return the model's score."""
            fields = {"prompt": sample.prompt, "response": sample.response}
            found = await post(address, {"text": [_filled(self.template, fields)]})
            try:
                (score,) = found[0]["embedding"]
            except (LookupError, TypeError, ValueError):
                raise ValueError(
                    f"{address} replied {short_repr(found)}; a reward model of SGLang replies "
                    "[{'embedding': [score]}]"
                ) from None
            return float(score)

        return sglang if self.format == "sglang" else plain


class Judge(_Service):
    """Scores with the marks that a language model gives by a rubric, divided by `full_marks`.

    The model's reply must end with the line "Score: N", N from 0 to `full_marks`. A reply that has
    no such line, or that was cut off, gives no score. The components are `tokens_in`, `tokens_out`
    and, if prices are set, `cost`.
    """

    model: str
    """Name of the model at the endpoint."""
    rubric: str
    """Instructions for the model: what to look for and how to give marks. May contain {prompt},
    {response} and {answer}. A text that it does not contain is appended."""
    full_marks: float = Field(10.0, gt=0)
    """Highest number of marks that the rubric gives."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature."""
    max_tokens: int = Field(512, ge=1)
    """Maximum length of the model's reply in tokens."""
    price_in: float = Field(0.0, ge=0)
    """Price of a million tokens of the request."""
    price_out: float = Field(0.0, ge=0)
    """Price of a million tokens of the reply."""
    body: dict[str, Any] = Field(default_factory=dict)
    """Additional fields of the request, such as `top_p`."""

    def build_scorer(self, settings: ScorerSettings, limit_seconds: float) -> Asynchronous:
        """Return an asynchronous function that scores one sample by asking the language model.

        Raises:
            UserError: If the service's key is missing, or the proxy for it is not an HTTP proxy.
        """
        post, address = self._poster().post, below(self.url, "chat/completions")

        async def score(sample: Sample) -> Returned:
            """Ask the model until a reply states marks; return marks divided by `full_marks`."""
            spent = {"tokens_in": 0.0, "tokens_out": 0.0}
            text, cut = "", False
            for _ in range(self.retries + 1):
                found = await post(address, self._request(sample))
                text, cut = _content(found, address)
                used = found.get("usage") or {}
                spent["tokens_in"] += float(used.get("prompt_tokens") or 0)
                spent["tokens_out"] += float(used.get("completion_tokens") or 0)
                marks = None if cut else marks_in(text, self.full_marks)
                if marks is not None:
                    return marks / self.full_marks, {**spent, **self._cost(spent)}
                if not self.temperature:
                    break  # At temperature 0 the next reply would be the same.
            if cut:
                raise ValueError(
                    f"model {self.model} gave no score: the reply was cut off at max_tokens "
                    f"{self.max_tokens}. Increase that argument."
                )
            raise ValueError(
                f'model {self.model} gave no score: the reply has no last line "Score: N" with N '
                f"from 0 to {self.full_marks:g}, and ends with {text[-100:]!r}"
            )

        return score

    def _cost(self, spent: dict[str, float]) -> dict[str, float]:
        """Return the component `cost`, the price of the spent tokens; empty if no price is set."""
        if not self.price_in and not self.price_out:
            return {}
        cost = spent["tokens_in"] * self.price_in + spent["tokens_out"] * self.price_out
        return {"cost": cost / _MILLION}

    def _request(self, sample: Sample) -> dict[str, Any]:
        """Return the body of the chat request that asks the model to judge one sample."""
        text = self.rubric
        fields = {"prompt": sample.prompt, "response": sample.response, "answer": sample.answer}
        for name, content in fields.items():
            if f"{{{name}}}" not in self.rubric and content:
                text += f"\n\n<{name}>\n{{{name}}}\n</{name}>"
        text = _filled(text, fields)
        text += f'\n\nEnd with a line "Score: N", N from 0 to {self.full_marks:g}.'
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            **self.body,
        }


def _filled(template: str, fields: dict[str, str]) -> str:
    """Return `template` with each `{name}` replaced by the field of that name.

    All are replaced in one pass, so that braces in the text of a field are never replaced. Unknown
    names stay unchanged.
    """
    return re.sub(r"{(\w+)}", lambda match: fields.get(match[1], match[0]), template)


def marks_in(reply: str, full_marks: float) -> float | None:
    """Return the marks in the last line "Score: N" of a model's reply; None if there are none.

    N must be a number from 0 to `full_marks`; `N/full_marks` is accepted too. Text before
    `</think>` and text after an unclosed `<think>` are ignored.
    """
    text = reply.rpartition("</think>")[2].partition("<think>")[0]
    lines = [found["stated"] for found in _SCORE.finditer(text)]
    found = _MARKS.fullmatch(lines[-1]) if lines else None
    if found is None or (found["full"] and float(found["full"]) != full_marks):
        return None
    marks = float(found["marks"])
    return marks if marks <= full_marks else None


def _content(reply: Any, address: str) -> tuple[str, bool]:
    """Return the text of a chat completion, and whether it was cut off at its maximum length.

    Args:
        reply: The decoded JSON of the reply.
        address: The service's address, for the error message.

    Raises:
        ValueError: If the reply is not a chat completion.
    """
    try:
        choice = reply["choices"][0]
        return str(choice["message"]["content"] or ""), choice.get("finish_reason") == "length"
    except (LookupError, TypeError, AttributeError):
        raise ValueError(
            f"{address} replied {short_repr(reply)}, which is not a chat completion"
        ) from None
