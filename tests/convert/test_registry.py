"""Models of transformers' registry: results equal eager attention's, or a refusal in our words."""

from collections import Counter

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the package transformers (pip install transformers)")

from fasttfm import functional as F  # noqa: E402
from fasttfm.convert import huggingface  # noqa: E402
from fasttfm.kernels.proof.launch_log import LaunchLog  # noqa: E402
from tests.registry import small, verdicts  # noqa: E402

NAMED = (
    "bart", "bert", "big_bird", "bigbird_pegasus", "bloom", "falcon", "gemma2", "gemma3_text", "git", "gpt2",
    "gpt_oss", "ibert", "llama", "longformer", "longt5", "m2m_100", "marian", "minimax_m3_vl", "mistral", "modernbert",
    "mpnet", "mpt", "nllb-moe", "nystromformer", "pegasus_x", "qwen3", "roformer", "splinter", "t5", "trocr", "vit",
    "xglm",
)  # fmt: skip
"""Popular models, and those with another kind of mask or with hard-coded attention."""


def sweep(kinds: list[str]) -> tuple[Counter[str], dict[str, str]]:
    """Return counts of equal, refused and not built models, printing reasons, and the other verdicts."""
    huggingface.register()
    classes, counts, wrong = small.classes(), Counter[str](), dict[str, str]()
    for kind in kinds:
        try:
            actual = verdicts.verdicts(classes[kind])
        except small.NotBuilt as error:
            counts["not built"] += 1
            print(f"{kind}: not built: {error}")
            continue
        wrong |= {f"{kind}, {case}": v for case, v in actual.items() if v not in verdicts.GOOD}
        by_name = {v for case, v in actual.items() if case.startswith("by name")}
        counts[by_name.pop() if len(by_name) == 1 else "equal or refused by the batch"] += 1
    print(f"{len(kinds)} architectures by name: {dict(counts)}")
    return counts, wrong


@pytest.mark.whole
def test_known_models_and_a_sample_are_equal_or_refused_in_outputs_and_gradients() -> None:
    """The whole registry is `python -m tests.registry`."""
    kinds = [*NAMED, *(kind for kind in list(small.classes())[::30] if kind not in NAMED)]
    counts, wrong = sweep([kind for kind in kinds if kind in small.classes()])
    assert not wrong
    assert counts["equal"] >= 28
    assert counts["refused"] <= 16


@pytest.mark.parametrize("kind", ["big_bird", "bloom", "falcon", "git", "sam_vision_model"])
def test_hard_coded_attention_is_refused_by_name_and_left_by_accelerate(kind: str) -> None:
    huggingface.register()
    eager = small.make(small.classes()[kind])
    with pytest.raises(ValueError, match=r"^attention 'fasttfm': \w+ hard-codes its attention; use 'eager' or acc"):
        verdicts.by_name(eager)
    classes = {type(module) for module in eager.modules() if "Attention" in type(module).__name__}
    line = huggingface.accelerate(eager).lines[0]
    assert (line.kind, line.action) == ("attention eager", "left")
    assert line.reason.endswith(" hard-codes its attention")
    assert eager.config._attn_implementation == "eager"
    assert classes == {type(module) for module in eager.modules() if "Attention" in type(module).__name__}


def test_a_wrong_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: torch.nn.Module) -> torch.nn.Module:
        ours = verdicts.accelerated(model)
        value = ours.encoder.layer[0].attention.self.value
        value.register_forward_hook(lambda module, inputs, output: output * 1.01 - output.detach() * 0.01)
        return ours

    monkeypatch.setattr(verdicts, "WAYS", {"wrong": wrong})
    found = verdicts.verdicts(small.classes()["bert"])
    assert found["wrong, unpadded"].startswith("gradient of ")


def test_a_causal_mask_is_marked_until_it_is_modified() -> None:
    config = transformers.LlamaConfig()
    mask = huggingface.boolean_mask(batch_size=1, q_length=5, kv_length=5, config=config)
    assert mask is not None
    assert mask.tolist() == torch.ones(5, 5, dtype=torch.bool).tril()[None, None].tolist()
    x, module = torch.randn(1, 2, 5, 8), torch.nn.Module().eval()
    module.is_causal = False
    marked, _ = huggingface.attention_forward(module, x, x, x, mask)
    read, _ = huggingface.attention_forward(module, x, x, x, mask.clone())
    torch.testing.assert_close(marked, read)
    mask[..., 4] = True
    changed, _ = huggingface.attention_forward(module, x, x, x, mask)
    read, _ = huggingface.attention_forward(module, x, x, x, mask.clone())
    torch.testing.assert_close(changed, read)
    assert not torch.allclose(changed, marked)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["bert", "bart", "gpt2", "gemma2", "gpt_oss"])
def test_a_model_on_the_kernels_gives_eager_s_outputs_and_gradients(kind: str) -> None:
    eager = small.make(small.classes()[kind])
    ours = verdicts.accelerated(eager)
    inputs, rows = small.batches(eager)["right" if kind in ("bert", "bart") else "left"]
    results = []
    for model, route in ((eager, "torch"), (ours, "triton")):
        with F.backend(route), LaunchLog() as log:
            output = model(**inputs).last_hidden_state
            output = output[rows[9]] if output.shape[1] == 9 else output
            weights = torch.linspace(-1, 1, output.numel()).view_as(output)  # a norm makes a plain mean constant
            (output * weights).sum().backward()
        assert bool(log.triton) == (route == "triton")
        results.append([output, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert max(gradient.abs().max() for gradient in results[0][1:]) > 1
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
