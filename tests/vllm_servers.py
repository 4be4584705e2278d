"""Real vLLM servers on a CPU, each in a process group of its own, that publish and record at once."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from record_processes import wait_until
from simcluster.calibrate.record import processes_of_group

__all__ = ["VOCABULARY", "VllmServer", "cpu_environment", "engine_words", "free_port", "write_tokenizer"]

VOCABULARY = 512
_SCHEDULER = "simcluster.calibrate.recorder.RecordingPublishingScheduler"
_START_S = 600.0  # generous: other jobs may hold the cores
_KILL_S = 30.0
_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WORDS = ("router", "server", "snapshot", "queue", "token", "prompt", "answer", "latency", "batch", "cache", "decode")


def write_tokenizer(folder: Path) -> Path:
    """Write a byte-level tokenizer with as many ids as the models have; return its file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [f"{a}{b}{c} {b}" for a in _WORDS for b in _WORDS for c in _WORDS]
    tokenizer.train_from_iterator(corpus, trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY
    file = folder / "tokenizer.json"
    tokenizer.save(str(file))
    options = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 8192,
        "eos_token": special[2],
        "pad_token": special[0],
        "chat_template": _CHAT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return file


def engine_words(cache: str) -> tuple[str, ...]:
    """Return vLLM's options for a recording and for a server alike; `cache`: size of the KV cache."""
    return (
        *("--load-format", "dummy", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"),
        *("--max-num-seqs", "8", "--max-num-batched-tokens", "256", "--block-size", "32"),
        *("--kv-cache-memory-bytes", cache),
    )


def cpu_environment(number: int, **more: str) -> dict[str, str]:
    """Return an environment in which the worker of an engine has a core of its own, as far as there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return {**os.environ, **quiet, "VLLM_CPU_OMP_THREADS_BIND": str(cores[number % len(cores)]), **more}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass
class VllmServer:
    """One OpenAI server of vLLM.

    Attributes:
        name: of the instance; its snapshots are published as `channel`.
        model: folder of the model.
        folder: for logs and recordings.
        number: which core its worker takes.
        cache: size of the KV cache.
        starts: how often it was started; each start has a recording of its own.
    """

    name: str
    model: Path
    folder: Path
    number: int
    cache: str
    port: int = field(default_factory=free_port)
    starts: int = 0
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def channel(self) -> str:
        return f"test-live.{os.getpid()}.{self.name}"

    @property
    def recording(self) -> Path:
        return self.folder / f"{self.name}-{self.starts}"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}-{self.starts}.log"

    def start(self) -> None:
        self.starts += 1
        (self.recording / "raw").mkdir(parents=True)
        command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        command += ["--served-model-name", self.name, "--host", "127.0.0.1", "--port", str(self.port)]
        command += [*engine_words(self.cache), "--no-enable-prefix-caching", "--scheduler-cls", _SCHEDULER]
        environment = cpu_environment(
            self.number,
            SIMCLUSTER_SNAPSHOT=f"shm:{self.channel}",
            SIMCLUSTER_RECORD_DIR=str(self.recording / "raw"),
            SIMCLUSTER_RECORD_OWNED="1",  # the engine dies with its server, however that goes
        )
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def is_up(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text(errors="replace")[-4000:]
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def wait(self) -> None:
        wait_until(self.is_up, _START_S, f"{self.name} answers")

    def kill(self) -> None:
        """Kill the whole group with SIGKILL and wait until nothing of it is left."""
        if self.process is None:
            return
        end = time.monotonic() + _KILL_S
        while processes_of_group(self.process.pid):
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.02)
            assert time.monotonic() < end, f"{self.name} cannot be killed"
        self.process.wait()
        self.process = None

    def remove(self) -> None:
        """Kill it for good, and take away what it published."""
        self.kill()
        Path(f"/dev/shm/simcluster.{self.channel}").unlink(missing_ok=True)
