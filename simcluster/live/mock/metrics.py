"""What `/metrics` of a mock server shows: vLLM's names, in simulated seconds."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from simcluster.live.mock.hosted_engine import HostedEngine, Stream
from simcluster.units import PS_PER_S

__all__ = ["MockMetrics"]

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)


class MockMetrics:
    """The metrics of one instance."""

    def __init__(self, hosted: HostedEngine) -> None:
        """Make them, all at 0."""
        self._hosted = hosted
        self._registry = CollectorRegistry()
        self._labels = {"model_name": hosted.spec.model, "engine": "0"}
        self._running = self._gauge("vllm:num_requests_running", "Requests in the running batch.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests that wait for their first step.")
        self._usage = self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that got their first token.")
        self._output = self._counter("vllm:generation_tokens", "Output tokens.")
        self._preempted = self._counter("vllm:num_preemptions", "Preemptions.")
        self._success = Counter(
            "vllm:request_success",
            "Requests by how they ended.",
            [*self._labels, "finished_reason"],
            registry=self._registry,
        )
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.")
        self._queue = self._histogram("vllm:request_queue_time_seconds", "From arrival to the first step.")
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.")
        self._tpot = self._histogram("vllm:request_time_per_output_token_seconds", "Mean time between tokens.")
        self._queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        info = {
            "block_size": str(hosted.spec.engine.block_size),
            "num_gpu_blocks": str(hosted.spec.engine.num_gpu_blocks),
            "enable_prefix_caching": str(hosted.spec.engine.enable_prefix_caching),
            "engine": "0",
        }
        Gauge("vllm:cache_config_info", "The KV cache.", list(info), registry=self._registry).labels(
            *info.values()
        ).set(1)
        self._told: dict[Counter, int] = {}

    def ended(self, stream: Stream) -> None:
        """Count a request that has ended."""
        self._success.labels(*self._labels.values(), stream.finish or "abort").inc()
        if stream.first_token_ps is None:
            return
        self._prompt.inc(stream.prompt_tokens)
        self._ttft.observe((stream.first_token_ps - stream.sent_ps) / PS_PER_S)
        if stream.scheduled_ps is not None:
            self._queue.observe((stream.scheduled_ps - stream.sent_ps) / PS_PER_S)
        if stream.end_ps is not None and stream.finish in ("stop", "length"):
            self._e2e.observe((stream.end_ps - stream.sent_ps) / PS_PER_S)
            if stream.tokens > 1:
                self._tpot.observe((stream.end_ps - stream.first_token_ps) / (stream.tokens - 1) / PS_PER_S)

    def text(self) -> bytes:
        """Return all of them in Prometheus' text format."""
        engine = self._hosted.engine
        usable = self._hosted.spec.engine.num_gpu_blocks - 1  # one is the null block
        self._running.set(engine.num_running)
        self._waiting.set(engine.num_waiting + engine.num_pending)
        self._usage.set(1 - engine.num_free_blocks / usable)
        queries, hits = engine.prefix_stats[:2]
        for counter, value in (
            (self._preempted, engine.num_preemptions),
            (self._output, self._hosted.num_tokens),
            (self._queries, queries),
            (self._hits, hits),
        ):
            counter.inc(value - self._told.get(counter, 0))
            self._told[counter] = value
        return generate_latest(self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, list(self._labels), registry=self._registry).labels(*self._labels.values())

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, list(self._labels), registry=self._registry).labels(*self._labels.values())

    def _histogram(self, name: str, text: str) -> Histogram:
        made = Histogram(name, text, list(self._labels), buckets=_SECONDS, registry=self._registry)
        return made.labels(*self._labels.values())
