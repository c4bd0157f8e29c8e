"""PEFT adapters on AutoModelForSeq2SeqLM of our directories: LoRA is trained, saved, loaded and merged."""

import pytest
import torch
from model_dirs import write_model_dir

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

from transformers import AutoModelForSeq2SeqLM  # noqa: E402

from fasttfm.convert import auto_model  # noqa: E402
from fasttfm.models import Transformer  # noqa: E402

SOURCE, LABELS = (4 + torch.arange(2 * length).view(2, length) * 5 % 26 for length in (7, 5))
TARGETS = (
    {"target_modules": ["linear1", "linear2"]},
    {"target_modules": ["out_proj"]},
    {"target_modules": "all-linear"},
    {"target_modules": ["linear1"], "target_parameters": ["in_proj_weight"]},
    {"target_modules": ["linear1"], "modules_to_save": ["output"]},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    auto_model.register()
    model_dir = write_model_dir(tmp_path_factory.mktemp("peft") / "model", trained=False)
    Transformer.from_pretrained(model_dir).save_pretrained(model_dir.parent / "base", model_dir)
    return model_dir.parent / "base"


def loaded(folder):
    return AutoModelForSeq2SeqLM.from_pretrained(folder)


def lora(**targets):
    return peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=4, lora_alpha=8, init_lora_weights=False, **targets)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=SOURCE, labels=LABELS).logits


@pytest.mark.parametrize("targets", TARGETS)
def test_lora_trains_saves_loads_and_merges(folder, tmp_path, targets):
    base = loaded(folder)
    plain = logits(base)
    model = peft.get_peft_model(base, lora(**targets))
    adapted = logits(model)
    assert (adapted - plain).abs().max() > 0.1
    model(input_ids=SOURCE, labels=LABELS).loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)) == parameter.requires_grad, name
    search = {"input_ids": SOURCE, "num_beams": 2, "max_new_tokens": 6}
    assert torch.equal(model.generate(**search), model.generate(**search, use_cache=False))
    model.save_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits(peft.PeftModel.from_pretrained(loaded(folder), tmp_path / "adapter")), adapted)
    torch.testing.assert_close(logits(loaded(tmp_path / "adapter")), adapted)
    with pytest.raises(ValueError, match="the model has adapters in it"):
        model.get_base_model().save_pretrained(tmp_path / "wrapped")
    assert not (tmp_path / "wrapped").exists()
    if "modules_to_save" in targets:  # an output beside the table
        return
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(loaded(tmp_path / "merged")), adapted, rtol=1e-4, atol=1e-4)
    target = torch.cat([torch.full((2, 1), 2), LABELS[:, :-1]], dim=1)
    ours = Transformer.from_pretrained(tmp_path / "merged")(SOURCE, target)
    torch.testing.assert_close(ours, adapted, rtol=1e-4, atol=1e-4)


def test_an_adapter_of_transformers_own_is_saved_alone(folder, tmp_path):
    model = loaded(folder)
    model.add_adapter(lora(target_modules=["linear1"]))
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    torch.testing.assert_close(logits(loaded(tmp_path)), logits(model))
