"""Prometheus text of the engine's figures. Names follow vLLM's where a benchmark looks for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from chatkv.engine.metrics import EngineStats

if TYPE_CHECKING:
    from .service import Service

_GAUGES = {
    "vllm:num_requests_running": ("Requests in the batch.", "num_running"),
    "vllm:num_requests_waiting": ("Requests in the queue.", "num_waiting"),
    "vllm:kv_cache_usage_perc": ("Share of the device pool that running requests hold, 0 to 1.", "kv_usage"),
    "chatkv_num_requests_loading": ("Requests that wait for blocks of a lower tier.", "num_loading"),
    "chatkv_batch_size": ("Sequences in the last step.", "batch_size"),
    "chatkv_unused_slot_share": ("Share of held token slots that hold no token.", "unused_slot_share"),
    "chatkv_num_blocks": ("Blocks of the device pool.", "num_blocks"),
    "chatkv_num_cached_blocks": ("Blocks that nobody holds, kept for the next hit.", "num_cached"),
    "chatkv_token_budget": ("Tokens that the next step may run.", "token_budget"),
    "chatkv_step_p50_seconds": ("Median time of the latest steps.", "step_p50_s"),
    "chatkv_step_p99_seconds": ("99th percentile of the latest steps.", "step_p99_s"),
}
_COUNTERS = {
    "vllm:prompt_tokens": ("Prompt tokens of admitted requests.", "num_prefix_query_tokens"),
    "vllm:generation_tokens": ("Generated tokens.", "num_generated_tokens"),
    "vllm:prefix_cache_queries": ("Prompt tokens looked up in the cache.", "num_prefix_query_tokens"),
    "vllm:prefix_cache_hits": ("Prompt tokens found there.", "num_prefix_hit_tokens"),
    "vllm:num_preemptions": ("Preempted requests.", "num_preemptions"),
    "chatkv_steps": ("Engine steps.", "num_steps"),
    "chatkv_computed_prompt_tokens": ("Prompt tokens that were computed.", "num_computed_prompt_tokens"),
    "chatkv_failed_requests": ("Requests that the engine failed.", "num_failed_requests"),
}
_TIER_GAUGES = {
    "chatkv_tier_used_bytes": ("Bytes that a tier takes; the disk's with everything in its directory.", "used_bytes"),
    "chatkv_tier_limit_bytes": ("Bytes that a tier may take.", "limit_bytes"),
    "chatkv_tier_blocks": ("Blocks that a tier holds.", "num_blocks"),
    "chatkv_tier_queued_blocks": ("Blocks that wait to be stored.", "num_queued"),
}
_TIER_COUNTERS = {
    "chatkv_tier_stored_blocks": ("Blocks stored in a tier.", "num_stored"),
    "chatkv_tier_loaded_blocks": ("Blocks loaded from a tier.", "num_loaded"),
    "chatkv_tier_evicted_blocks": ("Blocks that had to make room.", "num_evicted"),
    "chatkv_tier_skipped_blocks": ("Blocks refused: a full queue, or nothing to evict.", "num_skipped"),
    "chatkv_tier_damaged_blocks": ("Blocks that failed their check when read.", "num_damaged"),
}


class Metrics:
    """One registry of our own. Counters start again when a model is loaded, as Prometheus expects of a restart."""

    def __init__(self, service: Service):
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(service))
        self.responses = Counter(
            "chatkv_http_responses", "Answers by route and status.", ("route", "status"), registry=self.registry
        )

    def render(self) -> tuple[bytes, str]:
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4


class _EngineCollector(Collector):
    def __init__(self, service: Service):
        self._service = service

    def collect(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily("chatkv_model_ready", "1 when a model is loaded.", labels=["model_name"])
        model = self._service.models.loaded
        ready.add_metric([model.name if model else ""], float(model is not None))
        yield ready
        decisions = self._service.requests.num_load_decisions
        yield _by_label("chatkv_load_decisions", "Prompts that lower tiers held more of.", "decision", decisions)
        if model is None:
            return
        stats = model.engine.stats()
        for name, (text, field) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([model.name], getattr(stats, field))
            yield gauge
        for name, (text, field) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([model.name], getattr(stats, field))
            yield counter
        hits = stats.num_hit_tokens_by_tier
        yield _by_label("chatkv_tier_hit_tokens", "Prompt tokens found in a tier.", "tier", hits)
        yield from _of_tiers(stats, model.block_bytes)


def _of_tiers(stats: EngineStats, block_bytes: int) -> Iterator[Metric]:
    device = {
        "used_bytes": (stats.num_used + stats.num_cached) * block_bytes,
        "limit_bytes": stats.num_blocks * block_bytes,
        "num_blocks": stats.num_used + stats.num_cached,
    }
    for name, (text, field) in _TIER_GAUGES.items():
        gauge = GaugeMetricFamily(name, text, labels=["tier"])
        if field in device:
            gauge.add_metric(["device"], device[field])
        for tier, tier_stats in stats.tiers.items():
            gauge.add_metric([tier], getattr(tier_stats, field))
        yield gauge
    for name, (text, field) in _TIER_COUNTERS.items():
        yield _by_label(name, text, "tier", {tier: getattr(each, field) for tier, each in stats.tiers.items()})


def _by_label(name: str, text: str, label: str, values: Mapping[str, float]) -> CounterMetricFamily:
    counter = CounterMetricFamily(name, text, labels=[label])
    for value, amount in values.items():
        counter.add_metric([value], amount)
    return counter
