"""Lets fairseq make, train and save a checkpoint, and records the results of its model.

    python their_fairseq.py FAIRSEQ FOLDER [FLAG ...]

FAIRSEQ: an unpacked source of fairseq 0.12.2. FOLDER has text.src and text.tgt, lines of pieces; flags are those of
fairseq-train. fairseq's code writes dict.src.txt and dict.tgt.txt (Dictionary.save) and checkpoint.pt
(Trainer.save_checkpoint) there. computed.pt has tokens, log-probabilities and translations of SequenceGenerator.

hydra's composition of the configuration and the Cython extensions are replaced by stand-ins.
"""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.machinery
import os
import sys
import types
import warnings
from pathlib import Path
from typing import Any

ABSENT = ("hydra", "bitarray", "fairseq.data.data_utils_fast", "fairseq.data.token_block_utils_fast")


class Anything:
    """Object whose attributes and results are itself."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> Anything:
        return self

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __enter__(self) -> Anything:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class StandIn(types.ModuleType):
    """A module that is not installed."""

    __path__: list[str] = []  # noqa: RUF012 (of a package)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook for the modules in ABSENT."""

    def find_spec(self, name: str, *_: Any) -> Any:
        absent = any(name == each or name.startswith(f"{each}.") for each in ABSENT)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: Any) -> StandIn:
        return StandIn(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def hashable_dataclasses() -> None:
    """Make dataclass instances hashable: Python 3.11 refuses unhashable defaults, which fairseq uses."""
    original = dataclasses.dataclass

    def dataclass(cls: Any = None, /, **options: Any) -> Any:
        def wrap(given: type) -> type:
            made = original(given, **options)
            if made.__hash__ is None:
                made.__hash__ = object.__hash__  # type: ignore[method-assign]
            return made

        return wrap if cls is None else wrap(cls)

    dataclasses.dataclass = dataclass


def compose(_name: str, overrides: list[str], **_: Any) -> Any:
    """Compose fairseq's configuration like hydra: defaults, choices of groups, values."""
    from fairseq.dataclass.configs import FairseqConfig
    from fairseq.models import MODEL_DATACLASS_REGISTRY
    from fairseq.registry import REGISTRIES
    from fairseq.tasks import TASK_DATACLASS_REGISTRY
    from omegaconf import OmegaConf

    def plain(value: Any) -> Any:
        return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value

    defaults = FairseqConfig()
    values = {field.name: plain(getattr(defaults, field.name)) for field in dataclasses.fields(defaults)}
    dotted = []
    for override in overrides:
        name, _, choice = override.partition("=")
        if "." in name:
            dotted.append(override)
        elif choice != "null":
            known = {"task": TASK_DATACLASS_REGISTRY, "model": MODEL_DATACLASS_REGISTRY}
            registry = known.get(name) or REGISTRIES[name]["dataclass_registry"]
            values[name] = {"_name": choice, **plain(registry[choice]())} if choice in registry else None
    config = OmegaConf.create({name: value for name, value in values.items() if name != "_name"})
    return OmegaConf.merge(config, OmegaConf.from_dotlist(dotted))


def make_dictionaries(folder: Path, joint: bool) -> None:
    from fairseq.data import Dictionary

    texts = {side: (folder / f"text.{side}").read_text(encoding="utf-8").splitlines() for side in ("src", "tgt")}
    for side in texts:
        dictionary = Dictionary()
        for line in [*texts["src"], *texts["tgt"]] if joint else texts[side]:
            for piece in line.split(" "):
                dictionary.add_symbol(piece)
        dictionary.finalize(padding_factor=8)
        dictionary.save(str(folder / f"dict.{side}.txt"))


def main(folder: Path, flags: list[str]) -> None:
    import argparse

    import torch
    from fairseq import checkpoint_utils, options, tasks
    from fairseq.data.language_pair_dataset import collate
    from fairseq.dataclass import utils
    from fairseq.trainer import Trainer

    utils.compose = compose
    make_dictionaries(folder, joint="--share-all-embeddings" in flags)
    words = [str(folder), "--source-lang", "src", "--target-lang", "tgt", "--cpu", "--max-tokens", "4000"]
    words += ["--optimizer", "adam", "--lr", "1e-3", "--criterion", "label_smoothed_cross_entropy", "--dropout", "0"]
    args = options.parse_args_and_arch(options.get_training_parser("translation"), [*words, *flags])
    config = utils.convert_namespace_to_omegaconf(args)
    torch.manual_seed(3)
    task = tasks.setup_task(config.task)
    model = task.build_model(config.model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed_positions" not in name:  # or the likeliest token is the one before
                weight.copy_(torch.randn_like(weight) * (0.2 if "embed_tokens" in name else 0.3))
            if "embed_tokens" in name:
                weight[task.source_dictionary.pad()] = 0
    trainer = Trainer(config, task, model, task.build_criterion(config.criterion))

    lines = [
        [dictionary.encode_line(line, add_if_not_exist=False).long() for line in text.splitlines()[:3]]
        for dictionary, text in (
            (task.source_dictionary, (folder / "text.src").read_text(encoding="utf-8")),
            (task.target_dictionary, (folder / "text.tgt").read_text(encoding="utf-8")),
        )
    ]
    samples = [
        {"id": number, "source": source, "target": target} for number, (source, target) in enumerate(zip(*lines))
    ]
    pad, eos = task.source_dictionary.pad(), task.source_dictionary.eos()
    batch = collate(samples, pad, eos, left_pad_source=True, left_pad_target=False)
    trainer.begin_epoch(1)
    trainer.train_step([batch])
    trainer.consolidate_optimizer()
    trainer.save_checkpoint(str(folder / "checkpoint.pt"), {"epoch": 1, "val_loss": 2.0})

    (model,), _ = checkpoint_utils.load_model_ensemble([str(folder / "checkpoint.pt")], task=task)
    model.eval()
    generator = task.build_generator([model], argparse.Namespace(beam=1, max_len_a=0, max_len_b=20))
    computed = []
    with torch.no_grad():
        for sample in samples:
            one = collate([sample], pad, eos, left_pad_source=True, left_pad_target=False)
            log_probabilities = model.get_normalized_probs(model(**one["net_input"]), log_probs=True)
            ((best, *_),) = task.inference_step(generator, [model], one)
            computed.append(
                {
                    "source": one["net_input"]["src_tokens"][0].tolist(),
                    "input": one["net_input"]["prev_output_tokens"][0].tolist(),
                    "log_probabilities": log_probabilities[0],
                    "translation": best["tokens"].tolist(),
                }
            )
    pieces = [list(each.symbols) for each in (task.source_dictionary, task.target_dictionary)]
    torch.save({"pieces": pieces, "computed": computed}, folder / "computed.pt")


if __name__ == "__main__":
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # fairseq is older than this default
    warnings.simplefilter("ignore")
    hashable_dataclasses()
    sys.meta_path.insert(0, StandIns())
    sys.path.insert(0, sys.argv[1])
    main(Path(sys.argv[2]), sys.argv[3:])
