"""Options of `kvfold serve`: made once at the edge from the command line and KVFOLD_*, then frozen. Only this file
reads the environment; a bad value stops the start with one sentence."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from kvfold_kernels import backends
from kvfold_service.errors import StartError, first_problem

MIB = 1 << 20


class Settings(BaseSettings):
    """Serve the compressors of one model from this machine. It is ready when it prints its line `ready http://…`.

    examples
      kvfold serve --manifest tiny --weights random:1
          a small model with made-up weights, to try things with
      kvfold serve --manifest /models/DeepSeek-V4/config.json --weights /models/DeepSeek-V4 --cache-bytes 40000000000
          a model, with 40 GB of cache pages
      kvfold serve --manifest deepseek-v4-flash --weights W.safetensors --host 0.0.0.0 --token-file tokens
          for other machines: bearer tokens are needed then
      KVFOLD_MAX_REQUESTS=256 kvfold serve …
          every option may come from the environment
    """

    model_config = SettingsConfigDict(
        env_prefix="KVFOLD_",
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_prog_name="kvfold serve",
        cli_exit_on_error=False,
    )

    manifest: str = Field(description="a preset (tiny, deepseek-v4-flash, deepseek-v4-pro), a manifest or config.json")
    weights: str = Field(description="a .safetensors file, a checkpoint folder, or random:SEED")
    backend: str = Field("auto", description=f"auto, {', '.join(backends.NAMES)}")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8787, ge=0, le=65535, description="port to listen on; 0: any free one")
    max_requests: int = Field(64, ge=1, le=65536, description="requests that may be known at a time")
    pages: int = Field(1024, ge=1, description="cache pages for each compressor (256 tokens a page by default)")
    cache_bytes: int | None = Field(None, ge=1, description="bytes for all cache pages together; replaces --pages")
    max_step_tokens: int = Field(65536, ge=1, description="rows that a step may have")
    max_body_bytes: int = Field(1024 * MIB, ge=1024, description="bytes that a request body may have")
    staging_bytes: int | None = Field(
        None, ge=1024, description="bytes for bodies in flight; default 2 · max-body-bytes"
    )
    max_queue: int = Field(256, ge=1, description="calls with a body that may wait or run at a time")
    max_connections: int = Field(1024, ge=1, le=1 << 20, description="connections that may be open at a time")
    receive_timeout: float = Field(
        30.0, gt=0, le=86400, description="seconds for a body or a reply to pass, and one more for each MiB"
    )
    lease_seconds: float = Field(30.0, gt=0, le=86400, description="seconds that a request lives after its last use")
    graphs: Literal["auto", "off"] = Field(
        "auto", description="capture small steps as CUDA graphs where the backend can, or never"
    )
    remembered_steps: int = Field(256, ge=1, description="replies kept for repeated steps, for each tenant")
    token_file: Path | None = Field(None, description="file of bearer tokens; without it every caller is trusted")
    handle_key_file: Path | None = Field(None, description="file of a key for page handles (32 bytes or more)")
    peers_file: Path | None = Field(None, description="file of the workers that requests may be pulled from")
    nixl: bool = Field(False, description="register the page pools with NIXL, so that peers may read them")
    peer_token_file: Path | None = Field(None, description="file of the admin token that peers ask each other with")
    worker_id: str | None = Field(None, description="name of this worker in its handles; default: host name and port")
    insecure: bool = Field(False, description="allow listening beyond loopback without tokens")
    tls_cert: Path | None = Field(None, description="PEM file of the certificate chain; serves https")
    tls_key: Path | None = Field(None, description="PEM file of the certificate's key")
    metrics_host: str = Field("127.0.0.1", description="address of --metrics-port")
    metrics_port: int | None = Field(None, ge=0, le=65535, description="serve /metrics here, and only here")
    drain_seconds: float = Field(20.0, ge=0, le=86400, description="seconds from SIGTERM to the end, at most")
    canary_seconds: float = Field(60.0, ge=0, le=86400, description="seconds between checks of the worker; 0: none")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level to log")
    log_format: Literal["text", "json"] = Field("text", description="how log lines are written")
    otlp_endpoint: str | None = Field(
        None, description="URL that spans are sent to (OTLP over HTTP); default: what OTEL_EXPORTER_OTLP_ENDPOINT says"
    )

    @model_validator(mode="before")
    @classmethod
    def _find_otlp_endpoint(cls, given: dict[str, Any]) -> dict[str, Any]:
        url = given.get("otlp_endpoint")
        found = _Environment().traces_url() if url is None else _traces_url("--otlp-endpoint", url)
        return {**given, "otlp_endpoint": found}

    @model_validator(mode="after")
    def _check(self) -> Settings:
        if self.backend != "auto" and self.backend not in backends.NAMES:
            raise ValueError(f"--backend must be one of auto, {', '.join(backends.NAMES)}, not {self.backend!r}")
        if self.staging_bytes is not None and self.staging_bytes < self.max_body_bytes:
            raise ValueError("--staging-bytes must be at least --max-body-bytes")
        if self.token_file is not None and tokens_of_environment() is not None:
            raise ValueError("--token-file and KVFOLD_TOKENS: give only one of them")
        if self.token_file is None and tokens_of_environment() is None and not self.insecure:
            for option, host in (("--host", self.host), ("--metrics-host", self.metrics_host)):
                if not _is_loopback(host):
                    advice = "give --token-file, or --insecure if you mean it"
                    raise ValueError(f"{option} {host} is not loopback; {advice}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key belong together")
        if self.metrics_port and self.metrics_port == self.port:
            raise ValueError("--metrics-port must differ from --port")
        return self

    def staging(self) -> int:
        return self.staging_bytes or 2 * self.max_body_bytes


class _Environment(BaseSettings):
    """What only the environment says: tokens, which no list of processes should show, and OpenTelemetry's variables."""

    kvfold_tokens: SecretStr | None = None
    otel_sdk_disabled: str = ""
    otel_traces_exporter: str = "otlp"
    otel_exporter_otlp_endpoint: str = ""
    otel_exporter_otlp_traces_endpoint: str = ""

    def traces_url(self) -> str | None:
        """None: no spans are wanted."""
        if self.otel_sdk_disabled.lower() == "true" or self.otel_traces_exporter != "otlp":
            return None
        if self.otel_exporter_otlp_traces_endpoint:
            return self.otel_exporter_otlp_traces_endpoint
        base = self.otel_exporter_otlp_endpoint
        return _traces_url("OTEL_EXPORTER_OTLP_ENDPOINT", f"{base.rstrip('/')}/v1/traces") if base else None


def tokens_of_environment() -> str | None:
    """The lines of KVFOLD_TOKENS."""
    tokens = _Environment().kvfold_tokens
    return None if tokens is None else tokens.get_secret_value()


def _traces_url(option: str, url: str) -> str:
    """The URL, with OTLP's own path if it has none. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"{option} must be a URL like http://127.0.0.1:4318, not {url!r}")
    return url if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1/traces"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read(argv: list[str]) -> Settings:
    """Command line over environment over defaults. Raises StartError; SystemExit for --help."""
    try:
        return Settings(_cli_parse_args=argv)  # type: ignore[call-arg]
    except SettingsError as error:
        raise StartError(str(error)) from None
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        if not problem["loc"]:
            raise StartError(first_problem(error)) from None
        name = str(problem["loc"][0])
        option = f"--{name.replace('_', '-')}"
        if problem["type"] == "missing":
            raise StartError(f"{option} is needed (or KVFOLD_{name.upper()})") from None
        raise StartError(f"{option}: {problem['msg']}") from None


def handle_key(settings: Settings) -> bytes | None:
    """The key in --handle-key-file. Raises StartError."""
    if settings.handle_key_file is None:
        return None
    try:
        key = settings.handle_key_file.read_bytes()  # as it is: a random byte may be white space
    except OSError as error:
        raise StartError(f"--handle-key-file cannot be read: {error.strerror}") from None
    if len(key) < 32:
        raise StartError(f"--handle-key-file holds {len(key)} bytes; a key has at least 32")
    return key[:64]


def peer_authorization(settings: Settings) -> str | None:
    """The Authorization header of --peer-token-file. Raises StartError."""
    if settings.peer_token_file is None:
        return None
    try:
        token = settings.peer_token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"--peer-token-file cannot be read: {type(error).__name__}") from None
    if not token or not token.isprintable() or " " in token:
        raise StartError("--peer-token-file must hold one token and nothing else")
    return f"Bearer {token}"
