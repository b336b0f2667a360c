"""Metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from axcore.infer import Engine
from axcore_serve.gate import Gate

FIRST_TOKEN_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48)
NEXT_TOKEN_S = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024)


class Metrics:
    """The metrics of a server.

    Attributes:
        responses: responses by route and status.
        first_token: seconds from a request to the first token of a sample.
        next_token: seconds from a token to the next one of the same sample.
        disconnected: requests whose client left before the answer.
    """

    def __init__(self, engine: Engine, gate: Gate):
        self._registry = registry = CollectorRegistry()
        self.responses = Counter("axcore_http_responses", "Responses.", ("route", "status"), registry=registry)
        self.disconnected = Counter("axcore_http_disconnects", "Clients that left early.", registry=registry)
        self.first_token = Histogram(
            "axcore_time_to_first_token_seconds", "To the first token.", buckets=FIRST_TOKEN_S, registry=registry
        )
        self.next_token = Histogram(
            "axcore_inter_token_latency_seconds", "Between tokens.", buckets=NEXT_TOKEN_S, registry=registry
        )
        registry.register(_OfEngine(engine, gate))

    def page(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return generate_latest(self._registry)


def snapshot(engine: Engine, gate: Gate) -> dict[str, Any]:
    """The state of a server as a JSON object."""
    stats = engine.stats
    found = vars(stats) | {"requests": gate.num_requests, "samples": gate.num_samples}
    pools = {"pages": stats.pages, "host_pages": stats.host_pages}
    return found | {name: None if usage is None else usage._asdict() for name, usage in pools.items()}


class _OfEngine(Collector):
    """The counters of an engine when they are asked for."""

    def __init__(self, engine: Engine, gate: Gate):
        self._engine, self._gate = engine, gate

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        gauges = {
            "axcore_requests_in_progress": ("HTTP requests in progress.", self._gate.num_requests),
            "axcore_samples_running": ("Samples that run.", stats.running),
            "axcore_samples_waiting": ("Samples that wait for a row.", stats.waiting),
            "axcore_saved_states": (
                "States of rows that are saved for prompts with the same prefix.",
                stats.saved_states,
            ),
        }
        counters = {
            "axcore_steps": ("Steps of the engine.", stats.steps),
            "axcore_generated_tokens": ("Tokens sampled.", stats.tokens),
            "axcore_prompt_tokens": ("Tokens of prompts.", stats.prompt_tokens),
            "axcore_cached_prompt_tokens": ("Tokens of prompts that were cached.", stats.cached_tokens),
            "axcore_draft_tokens": ("Drafts that were verified.", stats.draft_tokens),
            "axcore_accepted_draft_tokens": ("Drafts that the model samples, too.", stats.accepted_tokens),
            "axcore_preemptions": ("Samples that lost their row to another.", stats.preempted),
            "axcore_offloaded": ("Samples whose state was copied to host memory.", stats.offloaded),
            "axcore_bytes_to_host": ("Decoding state copied to host memory.", stats.bytes_to_host),
            "axcore_bytes_to_device": ("Decoding state copied to the device.", stats.bytes_to_device),
            "axcore_programs_compiled": ("Programs compiled.", stats.compiled),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value)
        for name, text, usage in (
            ("axcore_pages", "Pages of the KV caches.", stats.pages),
            ("axcore_host_pages", "Pages in host memory.", stats.host_pages),
        ):
            pages = GaugeMetricFamily(name, text, labels=("state",))
            for state, value in (usage._asdict() if usage is not None else {}).items():
                pages.add_metric((state,), value)
            yield pages
