"""vLLM with its second model runner, in a process of its own: it reads a job and writes the tokens of each request.

    python second_runner.py job.json answer.json

Without a GPU, Triton's interpreter computes the runner's kernels, so that all of vLLM's own code runs on a CPU. It must
be prepared before vLLM is imported, and vLLM then changes parts of torch: hence the process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

STEPS = 2000  # a job that takes more hangs


def run_job(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run a job in another process.

    A job has the base model, guides and options of a `VllmEngine`, and requests: the step at which they come, prompt,
    arguments, stop tokens, number of tokens, and the number of tokens after which they are cancelled, if they are.
    """
    (folder / "job.json").write_text(json.dumps(job))
    command = [sys.executable, __file__, str(folder / "job.json"), str(folder / "answer.json")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError((run.stdout + run.stderr)[-6000:])
    return json.loads((folder / "answer.json").read_text())


def prepare() -> dict[str, Any]:
    """Let vLLM take its second runner in this process; return options for its engine."""
    variables = {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    variables |= {"VLLM_LOGGING_LEVEL": "WARNING", "TRITON_F32_DEFAULT": "ieee"}  # as precise as the base model alone
    if not torch.cuda.is_available():
        variables |= {"TRITON_INTERPRET": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ.update(variables)
    if torch.cuda.is_available():
        return {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2**31}
    import triton.backends
    from triton.runtime import interpreter

    driver = SimpleNamespace(is_active=lambda: True)
    triton.backends.backends.setdefault("cpu", SimpleNamespace(driver=driver))  # vLLM looks for a backend of this name
    _read_any_mask(interpreter)
    return {"gpu_memory_utilization": 0.2}


def _read_any_mask(interpreter: Any) -> None:
    """Let Triton's interpreter take masks that are the conjunction of a number and a truth value, as compilers do."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    load, store = builder.create_masked_load, builder.create_masked_store

    def truth(mask: Any) -> Any:
        return handle(mask.data.astype(bool), mask.dtype)

    builder.create_masked_load = lambda self, pointers, mask, *rest: load(self, pointers, truth(mask), *rest)
    builder.create_masked_store = lambda self, pointers, value, mask, *rest: store(
        self, pointers, value, truth(mask), *rest
    )


def main(job: dict[str, Any]) -> dict[str, Any]:
    options = prepare() | {"disable_log_stats": False} | job["options"]
    from radq.hosts.vllm import PROCESSORS, VllmEngine

    with VllmEngine(job["base"], job["guides"], **options) as engine:
        texts = decode(engine, job["requests"])
        metrics = {metric.name: getattr(metric, "value", None) for metric in engine.llm.get_metrics()}
        workers = engine.llm.collective_rpc(lambda worker: type(worker.model_runner).__module__)
    (processor,) = PROCESSORS
    return {
        "texts": texts,
        "runner": workers[0],
        "drafted": metrics.get("vllm:spec_decode_num_draft_tokens", 0),
        "accepted": metrics.get("vllm:spec_decode_num_accepted_tokens", 0),
        "preempted": metrics.get("vllm:num_preemptions", 0),
        "failed": processor.steerer.figures.totals["failed"],
    }


def decode(engine: Any, requests: list[dict[str, Any]]) -> list[list[int]]:
    """Let requests come and go at their steps."""
    from vllm import SamplingParams

    core, texts = engine.llm.llm_engine, [[] for _ in requests]
    waiting = sorted(range(len(requests)), key=lambda number: requests[number]["step"])
    for step in range(STEPS):
        while waiting and requests[waiting[0]]["step"] <= step:
            number = waiting.pop(0)
            request = requests[number]
            params = SamplingParams(
                temperature=0,
                max_tokens=request["max_tokens"],
                ignore_eos=True,
                stop_token_ids=request["stops"],
                detokenize=False,
                extra_args=request["arguments"],
            )
            core.add_request(str(number), {"prompt_token_ids": request["prompt"]}, params)
        for output in core.step():
            number = int(output.request_id)
            texts[number] = list(output.outputs[0].token_ids)
            leaves = requests[number].get("cancelled_after")
            if leaves is not None and len(texts[number]) >= leaves and not output.finished:
                core.abort_request([output.request_id])
        if not waiting and not core.has_unfinished_requests():
            return texts
    raise RuntimeError(f"requests have not ended after {STEPS} steps: {texts}")


if __name__ == "__main__":
    answer = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(answer))
