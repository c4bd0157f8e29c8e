"""Pre-training by Hugging Face's Trainer, as its examples do it: what a user has without fasttfm, on the same tokens.

    python -m pretraining.huggingface_trainer gpt --data DATA --out FOLDER --minutes 5 --preset gpt-tiny

DATA is what `fasttfm lm prepare` made. Model, batch, optimizer and rate are those of the preset, the rate constant
after its warm-up; a row is as many tokens of the running text, whatever documents these are of (transformers'
run_clm.py and run_mlm.py), of which for a BERT 15% are hidden as its collator hides them. A line of JSON on standard
output says how many updates were done, at what rate in their second half, and by how much memory; the model lies in
FOLDER.
"""

import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasttfm.cli.parser import Parser
from fasttfm.config import sections_of
from fasttfm.config.presets import preset_section
from fasttfm.config.training import TrainingConfig
from fasttfm.convert.config_json import described
from fasttfm.errors import UserError
from fasttfm.system.children import end_with_parent
from fasttfm.system.machine import pick_device
from fasttfm.system.memory import peak_memory
from fasttfm.training.precision import resolved_precision
from fasttfm_pretraining.config.bert import BertConfig
from fasttfm_pretraining.config.gpt import GPTConfig
from fasttfm_pretraining.data.documents import PreparedDocuments
from fasttfm_pretraining.interop.bert import their_config
from fasttfm_pretraining.interop.gpt import FIELDS


class Blocks(torch.utils.data.Dataset):
    """The running text cut into blocks of a length; the rest is left out."""

    def __init__(self, data: PreparedDocuments, length: int) -> None:
        self.documents, self.length = data.train, length

    def __len__(self) -> int:
        return self.documents.tokens // self.length

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        ids = torch.from_numpy(self.documents.read(number * self.length, (number + 1) * self.length))
        return {"input_ids": ids, "labels": ids}


def gpt_model(data: PreparedDocuments, preset: str) -> Any:
    """GPT2LMHeadModel of a preset, with fresh weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPTConfig(**{**preset_section(preset, "model", "gpt"), "vocab_size": len(data.tokenizer)})
    return GPT2LMHeadModel(
        GPT2Config(
            **described(config, FIELDS),
            n_inner=config.d_ff,
            embd_pdrop=config.dropout,
            bos_token_id=data.tokenizer.end,
            eos_token_id=data.tokenizer.end,
            use_cache=False,
        )
    )


def bert_model(data: PreparedDocuments, preset: str) -> Any:
    """BertForMaskedLM of a preset, with fresh weights."""
    from transformers import BertConfig as TheirConfig
    from transformers import BertForMaskedLM

    config = BertConfig(**{**preset_section(preset, "model", "bert"), "vocab_size": len(data.tokenizer)})
    return BertForMaskedLM(TheirConfig(**their_config(config, "bert", "BertForMaskedLM")))


def masked_collator(data: PreparedDocuments) -> Callable[[list[dict[str, Tensor]]], dict[str, Tensor]]:
    """Mask rows as transformers' DataCollatorForLanguageModeling does: 15% of the tokens, 80/10/10."""
    size, mask = len(data.tokenizer), data.tokenizer.mask
    assert mask is not None

    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        ids = torch.stack([row["input_ids"] for row in rows])
        hidden = torch.rand(ids.shape) < 0.15
        draw = torch.rand(ids.shape)
        seen = torch.where(hidden & (draw < 0.8), mask, ids)
        seen = torch.where(hidden & (draw >= 0.9), torch.randint(size, ids.shape), seen)
        return {"input_ids": seen, "labels": torch.where(hidden, ids, -100)}

    return collate


MODELS: dict[str, Callable[[PreparedDocuments, str], Any]] = {"gpt": gpt_model, "bert": bert_model}
COLLATORS: dict[str, Callable[[PreparedDocuments], Any]] = {"gpt": lambda data: None, "bert": masked_collator}


def train(
    kind: str, data: PreparedDocuments, preset: str, out: Path, *, started: float, minutes: float, seed: int
) -> dict[str, Any]:
    """Train a model of a kind until so many minutes after `started`, and save it."""
    try:
        from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
    except ImportError:
        raise UserError('Hugging Face\'s Trainer is not installed: pip install "fasttfm[hf,trainers]"') from None
    recipe = TrainingConfig(**preset_section(preset, "training", kind))
    sizes = sections_of(kind)["data"](**preset_section(preset, "data", kind))
    rows = sizes.max_tokens // sizes.row_length
    set_seed(seed)
    times: list[float] = []

    class Clock(TrainerCallback):
        """Ends the training when its time is over."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            times.append(time.monotonic())
            control.should_training_stop = times[-1] - started >= 60 * minutes

    arguments = TrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=recipe.update_freq,
        max_steps=1_000_000_000,
        learning_rate=recipe.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=recipe.warmup_updates,
        adam_beta1=recipe.adam_betas[0],
        adam_beta2=recipe.adam_betas[1],
        adam_epsilon=recipe.adam_eps,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.clip_norm,
        bf16=resolved_precision(recipe.precision, pick_device(None)) == "bf16",
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=seed,
    )
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = MODELS[kind](data, preset)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Blocks(data, sizes.row_length),
        data_collator=COLLATORS[kind](data),
        callbacks=[Clock()],
    )
    trainer.train()
    model.save_pretrained(out)
    half = len(times) // 2
    tokens = rows * sizes.row_length * recipe.update_freq
    return {
        "tokens_per_second": tokens * (len(times) - 1 - half) / (times[-1] - times[half]) if len(times) > 2 else 0.0,
        "updates": len(times),
        "peak_memory": peak_memory(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    started = time.monotonic()
    parser = Parser(prog="python -m pretraining.huggingface_trainer", description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=sorted(MODELS))
    parser.add_argument("--data", type=Path, required=True, help="what fasttfm lm prepare made")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--preset", default="gpt-tiny", help="(default: %(default)s)")
    parser.add_argument("--minutes", type=float, required=True, help="from the start of this command")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    times = {"started": started, "minutes": args.minutes}
    try:
        data = PreparedDocuments.open(args.data)
        print(json.dumps(train(args.kind, data, args.preset, args.out, **times, seed=args.seed)))
    except UserError as error:
        print(f"huggingface_trainer: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    end_with_parent()
    raise SystemExit(main())
