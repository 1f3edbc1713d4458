"""TRL's side of `against_trl.py`, run by an interpreter that has TRL: GRPOTrainer on the same work, a step at a time.

For each line on stdin it takes one training step and answers with one line of JSON: seconds by part. It ends when
stdin does. Knows: TRL. Does not know: Rollforge (its interpreter need not have it).

    python benchmarks/trl_side.py MODEL_FOLDER THREADS
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from common import use_threads
from grpo_work import COMPLETIONS, LEARNING_RATE, PROMPTS_PER_STEP, TEMPERATURE, TOKENS, questions, reward

STEPS = 1000
"""More than will be asked for; stdin decides."""
Spent = defaultdict[str, float]
PARTS = {"_generate_single_turn": "generate", "compute_loss": "forward"}


def main(folder: str, threads: int) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # what libraries print must not mix with the answers
    os.dup2(2, 1)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    use_threads(threads)
    spent: Spent = defaultdict(float)
    with tempfile.TemporaryDirectory() as output:
        trainer = make_trainer(folder, output)
        for name, part in PARTS.items():
            setattr(trainer, name, timed(getattr(trainer, name), spent, part))
        trainer.accelerator.backward = timed(trainer.accelerator.backward, spent, "backward")
        trainer.add_callback(on_request(spent, answers))
        trainer.train()


def make_trainer(folder: str, output: str) -> Any:
    """GRPOTrainer as its documentation has it: bf16 autocast over float32 weights, no KL."""
    from datasets import Dataset  # type: ignore[import-not-found, unused-ignore]
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found, unused-ignore]

    def rewards(completions: list[Any], **_: Any) -> list[float]:
        return [reward(completion[0]["content"]) for completion in completions]

    rows = [{"prompt": [{"role": "user", "content": text}]} for text in questions(PROMPTS_PER_STEP * STEPS)]
    config = GRPOConfig(
        output_dir=output,
        per_device_train_batch_size=PROMPTS_PER_STEP * COMPLETIONS,
        num_generations=COMPLETIONS,
        max_completion_length=TOKENS,
        generation_kwargs={"min_new_tokens": TOKENS},
        temperature=TEMPERATURE,
        beta=0.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_steps=STEPS,
        use_cpu=True,
        bf16=True,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        shuffle_dataset=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=folder,
        args=config,
        train_dataset=Dataset.from_list(rows),
        reward_funcs=rewards,
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
    )


def timed(function: Callable[..., Any], spent: Spent, part: str) -> Callable[..., Any]:
    """`function`, its seconds added to `spent[part]`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[part] += time.perf_counter() - started

    return call


def on_request(spent: Spent, answers: Any) -> Any:
    """A callback that holds each step back until it is asked for, and says what it took."""
    from transformers import TrainerCallback

    class OnRequest(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not sys.stdin.readline():
                answers.close()
                os._exit(0)  # Trainer has no quiet way out between two steps
            spent.clear()
            self.started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            print(json.dumps({**spent, "step": time.perf_counter() - self.started}), file=answers, flush=True)

    return OnRequest()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
