"""The job of `vs_trl` in TRL's GRPOTrainer; runs in TRL's own environment and knows nothing of slipstream.

Its best settings on a CPU: no gradient checkpointing, one micro-batch of the whole step, fused AdamW, both cores.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

_INTEGER = re.compile(r"-?\d+")


def last_number(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """1.0 if the last integer of the completion is the answer."""
    found = [_INTEGER.findall(completion) for completion in completions]
    return [
        float(bool(numbers) and int(numbers[-1]) == int(gold))
        for numbers, gold in zip(found, answer, strict=True)
    ]


class Clock(TrainerCallback):
    """Notes each step's end, in wall and CPU seconds since the first step began, with its mean reward."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def on_log(self, args: object, state: object, control: object, logs: dict[str, float], **_: object) -> None:
        if "reward" in logs:
            wall, cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
            self.rows.append({"wall": wall, "cpu": cpu, "reward": logs["reward"]})


def main(job_file: str, out_file: str) -> None:
    """Train and write one row per step."""
    job = json.loads(Path(job_file).read_text())
    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    clock = Clock()
    config = GRPOConfig(
        output_dir=job["scratch"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=job["groups"] * job["group_size"],
        num_generations=job["group_size"],
        max_completion_length=job["max_new_tokens"],
        temperature=1.0,
        top_k=0,
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=job["warmup_steps"],
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        max_grad_norm=1.0,
        weight_decay=0.0,
        epsilon=0.2,
        beta=0.0,
        max_steps=job["steps"],
        seed=job["seed"],
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=last_number,
        args=config,
        train_dataset=Dataset.from_list(job["rows"]),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    Path(out_file).write_text(json.dumps(clock.rows))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
