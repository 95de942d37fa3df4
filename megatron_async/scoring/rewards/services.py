"""Rewards that ask a service: `http` (one that scores) and `judge` (a model with a rubric).

Invariants
- They wait and never block: hundreds at once share one process and one pool of connections.
- What is refused for now (429, 5xx) or cannot be reached is tried again, with growing pauses,
  within the score's limit. After the last try the service counts as unavailable, which is no
  statement about the response (`task.on_scorer_timeout`). So does one whose reply is too large.
- Only a reply to the request itself counts. A redirect that drops the request's body is a failure.
- The address is used as it was given. The proxy variables of the environment are honored, but never
  for an address of this machine.
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
_LARGEST_REPLY_MIB: Final = 4
# A line, or the end of one after a sentence, that states a score: "**Final score (0-10):** 7/10".
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


class JsonPoster:
    """Posts JSON and reads JSON, again where a service is busy. For one event loop.

    Raises UserError when the key is not in the environment.
    """

    def __init__(self, api_key_env: str, retries: int) -> None:
        self._headers = {}
        self._retries = retries
        self._opened: AsyncGenerator[aiohttp.ClientSession] | None = None
        self._session: aiohttp.ClientSession | None = None
        if api_key_env:
            if api_key_env not in os.environ:
                raise UserError(
                    f"api_key_env is {api_key_env!r}, and there is no such environment variable"
                )
            self._headers["Authorization"] = f"Bearer {os.environ[api_key_env]}"

    async def post(self, url: str, body: dict[str, Any]) -> Any:
        """Return the reply's JSON. Raises Unavailable after the last try."""
        address, proxy = URL(url, encoded="%" in url and url.isascii()), proxy_of(url)
        if self._session is None:  # it needs a running loop
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
                problem = f"its reply is not JSON: {error}"
                break
            if number < self._retries:
                await asyncio.sleep(pause)
        raise Unavailable(f"{url}: {problem}")

    async def close(self) -> None:
        """Close the connections."""
        if self._opened is not None:
            await self._opened.aclose()


async def _session(headers: Mapping[str, str]) -> AsyncGenerator[aiohttp.ClientSession]:
    """Yield a session, closed with the generator: at the latest by the end of the event loop."""
    connector, trace = aiohttp.TCPConnector(limit=0), aiohttp.TraceConfig()
    trace.on_request_redirect.append(_check_redirect)
    async with aiohttp.ClientSession(
        connector=connector, headers=headers, trace_configs=[trace]
    ) as session:
        yield session


async def _check_redirect(
    _session: aiohttp.ClientSession, _context: Any, found: aiohttp.TraceRequestRedirectParams
) -> None:
    """Refuse a redirect that would be followed without the request's body. Raises Unavailable."""
    location = found.response.headers.get("Location")
    if location is not None and found.response.status not in (307, 308):
        target = found.url.join(URL(location))
        raise Unavailable(f"{found.url}: it redirects to {target} without the request's body")


def below(url: str, path: str) -> str:
    """Return the address of `path` below a service's `url`, whose query is kept."""
    base, mark, query = url.partition("?")
    return f"{base.rstrip('/')}/{path}{mark}{query}"


def proxy_of(url: str) -> str | None:
    """Return the proxy that the environment names for `url`; None for an address of this machine.

    The variables are `http_proxy`, `https_proxy`, `all_proxy` and `no_proxy`, in lower or upper
    case. Raises UserError for a proxy that does not speak HTTP.
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
            f"the environment names the proxy {proxy} for {url}; only HTTP proxies can be used: "
            f"set {parsed.scheme}_proxy to one, or add {host} to no_proxy"
        )
    return proxy


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    mapped = getattr(address, "ipv4_mapped", None) or address
    return bool(mapped.is_loopback or mapped.is_unspecified)


def _is_in(host: str, network: str) -> bool:
    """Return whether an address is in a network such as 10.0.0.0/8."""
    try:
        return "/" in network and ipaddress.ip_address(host) in ipaddress.ip_network(network, False)
    except ValueError:
        return False


async def _content_of(reply: aiohttp.ClientResponse) -> bytes:
    """Read the whole reply, decompressed. Raises Unavailable for one that is too large."""
    try:
        await reply.content.readexactly((_LARGEST_REPLY_MIB << 20) + 1)
    except asyncio.IncompleteReadError as error:
        return error.partial
    raise Unavailable(f"{reply.url}: its reply has more than {_LARGEST_REPLY_MIB} MiB")


class _Service(Settings):
    """Settings that both have."""

    url: str
    """Address, http:// or https://."""
    api_key_env: str = ""
    """Environment variable that holds a bearer token."""
    retries: int = Field(3, ge=0)
    """More tries of a request that failed for now."""

    @field_validator("url")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if not re.match(r"https?://[^/\s]+", value):
            raise ValueError(f"url is {value!r}; it must begin with http:// or https://")
        return value

    def _poster(self) -> JsonPoster:
        proxy_of(self.url)  # refuses a proxy that cannot be used before anything is scored
        return JsonPoster(self.api_key_env, self.retries)


class Http(_Service):
    """The score that a service gives.

    `plain` posts `prompt`, `response`, `answer` and `metadata` and reads a number, or an object
    with `score` and named parts. `sglang` asks a reward model that SGLang serves (its `/classify`).
    """

    format: Literal["plain", "sglang"] = "plain"
    """What the service talks."""
    template: str = "{prompt}\n{response}"
    """sglang: the text that the reward model reads."""

    def build_scorer(self, settings: ScorerSettings, limit_seconds: float) -> Asynchronous:
        """The reward."""
        post, address = self._poster().post, below(self.url, "classify")

        async def plain(sample: Sample) -> Returned:
            row = {"prompt": sample.prompt, "response": sample.response, "answer": sample.answer}
            found = await post(self.url, {**row, "metadata": dict(sample.metadata)})
            if isinstance(found, dict) and "score" in found:
                return found.pop("score"), found
            return found  # type: ignore[no-any-return]

        async def sglang(sample: Sample) -> Returned:
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
    """The score that a language model gives by a rubric, divided by `full_marks`.

    Its reply ends with the line "Score: N", N from 0 to `full_marks`; a reply without such a line,
    or one that was cut off, gives no score. Parts: `tokens_in`, `tokens_out`, and with prices
    `cost`.
    """

    model: str
    """Name of the model at the endpoint."""
    rubric: str
    """What to look for and how to count. May hold {prompt}, {response}, {answer}; what it does not
    hold is put behind it."""
    full_marks: float = Field(10.0, gt=0)
    """The best score of the rubric."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature."""
    max_tokens: int = Field(512, ge=1)
    """Longest reply."""
    price_in: float = Field(0.0, ge=0)
    """Price of a million tokens of request."""
    price_out: float = Field(0.0, ge=0)
    """... of reply."""
    body: dict[str, Any] = Field(default_factory=dict)
    """More fields of the request, e.g. `top_p`."""

    def build_scorer(self, settings: ScorerSettings, limit_seconds: float) -> Asynchronous:
        """The reward."""
        post, address = self._poster().post, below(self.url, "chat/completions")

        async def score(sample: Sample) -> Returned:
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
                    break  # the reply would be the same again
            if cut:
                raise ValueError(
                    f"{self.model} gave no score: its reply was cut off at max_tokens "
                    f"{self.max_tokens}; raise that argument"
                )
            raise ValueError(
                f'{self.model} gave no score: its reply has no last line "Score: N" with N from 0 '
                f"to {self.full_marks:g}, and ends {text[-100:]!r}"
            )

        return score

    def _cost(self, spent: dict[str, float]) -> dict[str, float]:
        if not self.price_in and not self.price_out:
            return {}
        cost = spent["tokens_in"] * self.price_in + spent["tokens_out"] * self.price_out
        return {"cost": cost / _MILLION}

    def _request(self, sample: Sample) -> dict[str, Any]:
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
    """All places at once: what one field holds is never taken for the place of another."""
    return re.sub(r"{(\w+)}", lambda match: fields.get(match[1], match[0]), template)


def marks_in(reply: str, full_marks: float) -> float | None:
    """Return the marks that the last score line of `reply` states; None if they are not a score.

    A thought before `</think>`, or one without an end, does not count.
    """
    text = reply.rpartition("</think>")[2].partition("<think>")[0]
    lines = [found["stated"] for found in _SCORE.finditer(text)]
    found = _MARKS.fullmatch(lines[-1]) if lines else None
    if found is None or (found["full"] and float(found["full"]) != full_marks):
        return None
    marks = float(found["marks"])
    return marks if marks <= full_marks else None


def _content(reply: Any, address: str) -> tuple[str, bool]:
    """Return the text of a chat completion, and whether it was cut off. Raises ValueError."""
    try:
        choice = reply["choices"][0]
        return str(choice["message"]["content"] or ""), choice.get("finish_reason") == "length"
    except (LookupError, TypeError, AttributeError):
        raise ValueError(
            f"{address} replied {short_repr(reply)}, which is no chat completion"
        ) from None
