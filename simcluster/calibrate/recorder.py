"""What records a running vLLM: a scheduler class for each engine loop, and a worker class.

They are given to vLLM by name and import it when they are first asked for:

    --scheduler-cls simcluster.calibrate.recorder.RecordingScheduler       (synchronous loop)
    --scheduler-cls simcluster.calibrate.recorder.RecordingAsyncScheduler  (asynchronous loop)
    --worker-cls    simcluster.calibrate.recorder.RecordingWorker          (optional: time inside of the worker)

`RecordingPublishingScheduler` and `RecordingPublishingAsyncScheduler` publish snapshots for a router as well, as
`simcluster.backends.vllm_publisher` says; publishing then counts as host time of a step, not as its execution.

All write to the folder in the environment variable SIMCLUSTER_RECORD_DIR, in the form of `simcluster.calibrate.raw`.
vLLM kills its engine core on exit, so what is buffered is written whenever the engine falls idle, every two seconds,
and when vLLM ends all requests, which is the last thing that it reliably does. Beside vLLM, only the standard library
and numpy are needed, since a machine with a GPU may have nothing else.
"""

import ctypes
import importlib
import os
import platform
import signal
import time
from array import array
from pathlib import Path
from typing import Any

from simcluster.calibrate.raw import DECODE, PRODUCES, RawFiles

__all__ = ["FOLDER_VARIABLE", "OWNED_VARIABLE", "Tape", "die_with_parent", "processor_name", "vllm_name"]

FOLDER_VARIABLE = "SIMCLUSTER_RECORD_DIR"
OWNED_VARIABLE = "SIMCLUSTER_RECORD_OWNED"  # set where the engine was started only to be recorded
_FLUSH_NS = 2_000_000_000
_PUBLISHER = "simcluster.backends.vllm_publisher"  # needs all of simcluster, so it is imported only when asked for
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def vllm_name(module: str, name: str) -> Any:
    """Return something of a module, vLLM's or one that needs vLLM, which is imported when it is first needed."""
    return getattr(importlib.import_module(module), name)


def die_with_parent() -> None:
    """Have this process killed when the one that started it ends, however that happens (Linux)."""
    if platform.system() == "Linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def processor_name() -> str:
    """Return the kind of processor, such as "AMD EPYC 9B45 (CPU)"."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine() or 'unknown'} (CPU)"


class Tape:
    """Steps and requests of one engine, buffered in memory and written by and by.

    Args:
        folder: where the files go.
        scheduler: vLLM's scheduler.
        resolved: what vLLM made of its options.
    """

    def __init__(self, folder: Path, scheduler: Any, resolved: dict[str, Any]) -> None:
        self._files = RawFiles(folder, os.getpid(), resolved)
        self._scheduler = scheduler
        self._steps: array[int] = array("q")
        self._requests: list[list[Any]] = []
        self._numbers: dict[str, int] = {}  # of the requests in the engine
        self._live: dict[str, Any] = {}
        self._arrived = 0
        self._scheduled: dict[int, tuple[int, int, list[int]]] = {}  # batches whose results are not there yet
        self._written_ns = time.monotonic_ns()

    def added(self, request: Any) -> None:
        """Note a request that reaches the engine."""
        key = request.request_id
        self._numbers[key], self._live[key] = self._arrived, request
        row = ["add", self._arrived, key, time.monotonic_ns(), request.num_prompt_tokens, request.max_tokens]
        self._requests.append(row)
        self._arrived += 1

    def scheduled(self, output: Any, begin_ns: int) -> None:
        """Note a batch that is about to run; `updated` completes it."""
        if not output.total_num_scheduled_tokens:
            return
        end_ns = time.monotonic_ns()
        scheduler, numbers = self._scheduler, self._numbers
        requests = scheduler.requests
        preempted = [numbers[key] for key in sorted(output.preempted_req_ids or ())]
        entries: list[int] = []
        for key, tokens in output.num_scheduled_tokens.items():
            request = requests[key]
            context = request.num_computed_tokens - tokens  # schedule() has counted them already
            decode = tokens == 1 and context >= request.num_prompt_tokens
            kind = decode * DECODE + (not request.is_prefill_chunk) * PRODUCES
            entries += (numbers[key], tokens, context, kind)
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        state = (len(scheduler.running), len(scheduler.waiting), free, len(preempted), len(entries) // 4)
        # What this costs lies before the moment that counts as the end of schedule(): it never looks like execution.
        handed_ns = time.monotonic_ns()
        self._scheduled[id(output)] = (begin_ns, handed_ns, [handed_ns - end_ns, *state, *preempted, *entries])

    def updated(self, output: Any, begin_ns: int) -> None:
        """Note that the results of a batch are there and counted."""
        end_ns = time.monotonic_ns()
        found = self._scheduled.pop(id(output), None)
        if found is not None:
            scheduled_ns, handed_ns, rest = found
            self._steps.extend((scheduled_ns, handed_ns, begin_ns, end_ns, *rest))
        self._note_ends()
        scheduler = self._scheduler
        if end_ns - self._written_ns > _FLUSH_NS or not (scheduler.running or scheduler.waiting):
            self.flush()

    def aborted(self, *, everything: bool) -> None:
        """Note requests that were ended from outside."""
        self._note_ends()
        if everything or not self._live:
            self.flush()

    def _note_ends(self) -> None:
        for key in self._scheduler.finished_req_ids:
            request = self._live.pop(key, None)
            if request is not None:
                reason = str(request.get_finished_reason())
                row = ["end", self._numbers.pop(key), request.num_output_tokens, reason, time.monotonic_ns()]
                self._requests.append(row)

    def flush(self) -> None:
        """Write what is buffered; requests first, so that no step in the files has an unknown one."""
        self._files.write(self._requests, self._steps)
        self._requests.clear()
        self._steps = array("q")
        self._written_ns = time.monotonic_ns()


def _resolved(scheduler: Any) -> dict[str, Any]:
    """Return what vLLM made of its options, by its own names."""
    current_platform = vllm_name("vllm.platforms", "current_platform")
    config = scheduler.vllm_config
    options: dict[str, Any] = {}
    for part in (config.scheduler_config, config.cache_config, config.parallel_config):
        options |= {name: value for name, value in vars(part).items() if name[0] != "_" and _is_plain(value)}
    options |= {
        "max_model_len": scheduler.max_model_len,
        "block_size": scheduler.block_size,
        "num_gpu_blocks": scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
        "max_concurrent_batches": config.max_concurrent_batches,
        "enforce_eager": config.model_config.enforce_eager,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "quantization": config.model_config.quantization,
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
    }
    return {
        "vllm_version": vllm_name("vllm", "__version__"),
        "model": config.model_config.model,
        "device": processor_name() if current_platform.is_cpu() else current_platform.get_device_name(),
        "loop": "async" if options["async_scheduling"] else "sync",
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "engine": options,
    }


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _folder() -> Path:
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        raise ValueError(f"{FOLDER_VARIABLE} is not set; set it to the folder that the recording shall go to")
    return Path(folder)


def _subclass(name: str, base: Any, *methods: Any) -> type:
    """Make a class of functions, each of which calls the base's of its name."""
    return type(name, (base,), {each.__name__: each for each in methods} | {"__module__": __name__})


def _scheduler_class(name: str, base: Any, *, asynchronous: bool) -> type:
    """Make a subclass of one of vLLM's schedulers that keeps a tape."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if OWNED_VARIABLE in os.environ:
            die_with_parent()
        base.__init__(self, *args, **kwargs)
        resolved = bool(self.vllm_config.scheduler_config.async_scheduling)
        if resolved != asynchronous:
            kind = name.removesuffix("Scheduler").removesuffix("Async")
            wanted = f"{kind}{'Async' if resolved else ''}Scheduler"
            raise ValueError(f"{name} was given, but async_scheduling = {resolved}; use {__name__}.{wanted}")
        self.tape = Tape(_folder(), self, _resolved(self))

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin_ns = time.monotonic_ns()
        output = base.schedule(self, *args, **kwargs)
        self.tape.scheduled(output, begin_ns)
        return output

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        begin_ns = time.monotonic_ns()
        result = base.update_from_output(self, scheduler_output, model_runner_output)
        self.tape.updated(scheduler_output, begin_ns)
        return result

    def add_request(self: Any, request: Any) -> None:
        self.tape.added(request)
        base.add_request(self, request)

    def finish_requests(self: Any, request_ids: Any, finished_status: Any) -> Any:
        result = base.finish_requests(self, request_ids, finished_status)
        self.tape.aborted(everything=request_ids is None)
        return result

    return _subclass(name, base, __init__, schedule, update_from_output, add_request, finish_requests)


def _worker_class(name: str, base: Any) -> type:
    """Make a subclass of the platform's worker that notes wall and CPU time of each batch.

    On a GPU the worker may return before the device is done, so its times are no step times there.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if OWNED_VARIABLE in os.environ:
            die_with_parent()
        base.__init__(self, *args, **kwargs)
        file = RawFiles.worker_file(_folder(), os.getpid(), self.rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        self.record_file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.record_row = [0] * 7

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        cpu, begin = time.process_time_ns(), time.monotonic_ns()
        result = base.execute_model(self, scheduler_output, *args, **kwargs)
        end, tokens = time.monotonic_ns(), scheduler_output.total_num_scheduled_tokens
        self.record_row = [tokens, begin, end, 0, 0, cpu, time.process_time_ns()]
        if result is not None:
            write(self)
        return result

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.monotonic_ns()
        result = base.sample_tokens(self, *args, **kwargs)
        self.record_row[3:] = begin, time.monotonic_ns(), self.record_row[5], time.process_time_ns()
        write(self)
        return result

    def write(self: Any) -> None:
        if self.record_row[0]:
            os.write(self.record_file, array("q", self.record_row).tobytes())
            self.record_row = [0] * 7

    return _subclass(name, base, __init__, execute_model, sample_tokens)


def _platform_worker() -> Any:
    """Return the worker class that vLLM would choose here."""
    current_platform = vllm_name("vllm.platforms", "current_platform")
    if current_platform.is_cpu():
        return vllm_name("vllm.v1.worker.cpu_worker", "CPUWorker")
    if current_platform.is_xpu():
        return vllm_name("vllm.v1.worker.xpu_worker", "XPUWorker")
    return vllm_name("vllm.v1.worker.gpu_worker", "Worker")


_BASES = {  # of the scheduler classes: module, class, whether for the asynchronous loop
    "RecordingScheduler": ("vllm.v1.core.sched.scheduler", "Scheduler", False),
    "RecordingAsyncScheduler": ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler", True),
    "RecordingPublishingScheduler": (_PUBLISHER, "PublishingScheduler", False),
    "RecordingPublishingAsyncScheduler": (_PUBLISHER, "PublishingAsyncScheduler", True),
}


def __getattr__(name: str) -> type:  # PEP 562: the classes exist once somebody asks for them
    if name in _BASES:
        module, base, asynchronous = _BASES[name]
        made = _scheduler_class(name, vllm_name(module, base), asynchronous=asynchronous)
    elif name == "RecordingWorker":
        made = _worker_class(name, _platform_worker())
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = made
    return made
